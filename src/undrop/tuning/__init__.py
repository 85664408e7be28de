"""Finding p of every dropout within one training run, and whether dropout will help at all."""

from undrop.tuning.history import Entry, History
from undrop.tuning.tuner import Tuner
from undrop.tuning.validation import set_aside

__all__ = ["Entry", "History", "Tuner", "set_aside"]
