"""Find p of every dropout within one training run, and predict whether dropout will help at all."""

from undrop.tuning.advice import Advice, advise, advise_from
from undrop.tuning.history import Entry, History
from undrop.tuning.tuner import Tuner
from undrop.tuning.validation import set_aside

__all__ = ["Advice", "Entry", "History", "Tuner", "advise", "advise_from", "set_aside"]
