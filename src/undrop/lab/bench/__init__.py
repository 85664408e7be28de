"""What each way of regularizing costs, side by side in one run, as a ratio to dropout."""

from undrop.lab.bench.methods import METHODS
from undrop.lab.bench.run import Row, bench
from undrop.lab.bench.subjects import SIZES, SUBJECTS

__all__ = ["METHODS", "SIZES", "SUBJECTS", "Row", "bench"]
