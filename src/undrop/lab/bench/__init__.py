"""What a training step costs by each method, as a ratio to dropout's step in the same process.

To time another model, add it to ``subjects.py``; to time another method, add it to ``methods.py``.
"""

from undrop.lab.bench.methods import METHODS
from undrop.lab.bench.run import MethodTime, bench
from undrop.lab.bench.subjects import SIZES, SUBJECTS

__all__ = ["METHODS", "SIZES", "SUBJECTS", "MethodTime", "bench"]
