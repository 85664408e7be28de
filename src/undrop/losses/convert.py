"""Turn what a user passes as a loss into a ``Loss``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from undrop.errors import OptionError
from undrop.losses.base import CONVERTERS, Loss
from undrop.losses.generic import Generic
from undrop.losses.model_loss import ModelLoss


def as_loss(loss: Loss | Callable[[Tensor, Any], Tensor] | None) -> Loss:
    """A ``Loss`` from what a user passes.

    None is the model's own loss, or cross-entropy. A torch loss module becomes the ``Loss`` that is
    registered for its class in ``CONVERTERS``; any other callable is wrapped in ``Generic``.

    Raises:
        OptionError: for a class in place of an instance, or for something that can't be called.
    """
    if loss is None:
        return ModelLoss()
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type):
        name = loss.__name__
        raise OptionError(f"loss must be an instance, got the class {name}: pass {name}().")
    convert = CONVERTERS.find(type(loss))  # the class itself: a subclass may compute something else
    found = convert(loss) if convert is not None else None
    if found is not None:
        return found
    if callable(loss):
        return Generic(loss)
    raise OptionError(f"loss must be a Loss or a callable, got {type(loss).__name__}.")
