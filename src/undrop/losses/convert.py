"""From what a user passes as a loss to a ``Loss``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undrop.errors import OptionError
from undrop.losses.base import Loss
from undrop.losses.bce import BCEWithLogits
from undrop.losses.cross_entropy import CrossEntropy
from undrop.losses.generic import Generic
from undrop.losses.mse import MSE

__all__ = ["as_loss"]


def as_loss(loss: Loss | Callable[[Tensor, Any], Tensor] | None) -> Loss:
    """A ``Loss`` from what a user passes: None is cross-entropy; torch's own losses are known."""
    if loss is None:
        return CrossEntropy()
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type):
        name = loss.__name__
        raise OptionError(f"loss must be an instance, got the class {name}: pass {name}().")
    plain_mean = (
        getattr(loss, "reduction", None) == "mean" and getattr(loss, "weight", None) is None
    )
    # The type itself: a subclass may compute something else.
    if type(loss) is torch.nn.CrossEntropyLoss and plain_mean:
        return CrossEntropy(
            ignore_index=loss.ignore_index, label_smoothing=loss.label_smoothing, class_dim=1
        )
    if type(loss) is torch.nn.BCEWithLogitsLoss and plain_mean and loss.pos_weight is None:
        return BCEWithLogits()
    if type(loss) is torch.nn.MSELoss and plain_mean:
        return MSE()
    if callable(loss):
        return Generic(loss)
    raise OptionError(f"loss must be a Loss or a callable, got {type(loss).__name__}.")
