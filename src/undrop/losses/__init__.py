"""Losses, with their derivatives uᵀHu and ∂ℓ/∂ε along the output tangent u."""

from undrop.kernels.softmax import Coefficients, Derivatives
from undrop.losses.base import CONVERTERS, FORMS, ByClass, GivenLoss, Loss
from undrop.losses.cross_entropy import CrossEntropy
from undrop.losses.elementwise import MSE, BCEWithLogits
from undrop.losses.generic import Generic
from undrop.losses.model_loss import ModelLoss, Task, as_loss
from undrop.losses.softmax import AdaptiveSoftmax, LinearCrossEntropy

__all__ = [
    "CONVERTERS",
    "FORMS",
    "AdaptiveSoftmax",
    "BCEWithLogits",
    "ByClass",
    "Coefficients",
    "CrossEntropy",
    "Derivatives",
    "Generic",
    "GivenLoss",
    "LinearCrossEntropy",
    "Loss",
    "MSE",
    "ModelLoss",
    "Task",
    "as_loss",
]
