"""Objectives: what training minimizes."""

from undrop.objectives.analytic import PAPER, TAYLOR, Analytic
from undrop.objectives.base import Objective
from undrop.objectives.dropout import Dropout
from undrop.objectives.rivals import (
    L2,
    SAM,
    EarlyDropout,
    Jacobian,
    NoRegularization,
    RDrop,
    WeightNoise,
)
from undrop.objectives.step import Step

__all__ = [
    "L2",
    "PAPER",
    "SAM",
    "TAYLOR",
    "Analytic",
    "Dropout",
    "EarlyDropout",
    "Jacobian",
    "NoRegularization",
    "Objective",
    "RDrop",
    "Step",
    "WeightNoise",
]
