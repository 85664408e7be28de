"""What is dropout doing in my model? Taken apart, site by site, with standard errors."""

from undrop.diagnosis.checking import Check, check
from undrop.diagnosis.estimates import Estimate
from undrop.diagnosis.generalization import Bound, bound
from undrop.diagnosis.heads import Head, last_layer
from undrop.diagnosis.result import Diagnosis
from undrop.diagnosis.run import diagnose
from undrop.diagnosis.watching import Watcher

__all__ = [
    "Bound",
    "Check",
    "Diagnosis",
    "Estimate",
    "Head",
    "Watcher",
    "bound",
    "check",
    "diagnose",
    "last_layer",
]
