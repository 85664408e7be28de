"""What each way of regularizing costs, side by side in one run, as a ratio to dropout.

To time another model, add one function to ``subjects.py``; to time another method, one to
``methods.py``.
"""

from undrop.lab.bench.methods import METHODS
from undrop.lab.bench.run import Row, bench
from undrop.lab.bench.subjects import SIZES, SUBJECTS

__all__ = ["METHODS", "SIZES", "SUBJECTS", "Row", "bench"]
