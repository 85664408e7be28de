"""What each way of regularizing costs, side by side in one run, as a ratio to dropout."""

from undrop.bench.methods import METHODS
from undrop.bench.run import Row, bench
from undrop.bench.subjects import SIZES, SUBJECTS

__all__ = ["METHODS", "SIZES", "SUBJECTS", "Row", "bench"]
