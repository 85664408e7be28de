"""What is dropout doing in my model? Taken apart, site by site, with standard errors."""

from undrop.diagnose.checking import Check, check
from undrop.diagnose.estimates import Estimate
from undrop.diagnose.generalization import Bound, bound
from undrop.diagnose.heads import Head, last_layer
from undrop.diagnose.result import Diagnosis
from undrop.diagnose.run import diagnose
from undrop.diagnose.watching import Watcher

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
