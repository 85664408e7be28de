"""Measure what dropout does in a model, site by site, with standard errors."""

from undrop.diagnosis.checks import Check, check
from undrop.diagnosis.measure.benefit import Benefit
from undrop.diagnosis.measure.estimates import Estimate
from undrop.diagnosis.report.comparison import Comparison
from undrop.diagnosis.report.result import Diagnosis
from undrop.diagnosis.study import diagnose
from undrop.diagnosis.theorem.generalization import Bound, bound
from undrop.diagnosis.theorem.heads import Head, last_layer
from undrop.diagnosis.watcher import Watcher

__all__ = [
    "Benefit",
    "Bound",
    "Check",
    "Comparison",
    "Diagnosis",
    "Estimate",
    "Head",
    "Watcher",
    "bound",
    "check",
    "diagnose",
    "last_layer",
]
