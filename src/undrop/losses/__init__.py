"""Losses, with their derivatives uᵀHu and ∂ℓ/∂ε along the output tangent u."""

from undrop.kernels.softmax import Coefficients
from undrop.losses.adaptive import AdaptiveSoftmax
from undrop.losses.base import FORMS, Derivatives, Loss
from undrop.losses.bce import BCEWithLogits
from undrop.losses.by_class import ByClass
from undrop.losses.convert import as_loss
from undrop.losses.cross_entropy import CrossEntropy
from undrop.losses.generic import Generic
from undrop.losses.linear import LinearCrossEntropy
from undrop.losses.mse import MSE

__all__ = [
    "FORMS",
    "AdaptiveSoftmax",
    "BCEWithLogits",
    "ByClass",
    "Coefficients",
    "CrossEntropy",
    "Derivatives",
    "Generic",
    "LinearCrossEntropy",
    "Loss",
    "MSE",
    "as_loss",
]
