"""Objectives: what training minimizes."""

from undrop.objectives.analytic import PAPER, TAYLOR, Analytic
from undrop.objectives.base import OBJECTIVES, Objective
from undrop.objectives.dropout import Dropout, EarlyDropout
from undrop.objectives.jacobian import Jacobian
from undrop.objectives.no_regularization import L2, NoRegularization
from undrop.objectives.perturbed_weights import SAM, WeightNoise
from undrop.objectives.r_drop import RDrop
from undrop.objectives.step import Step

__all__ = [
    "L2",
    "OBJECTIVES",
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
