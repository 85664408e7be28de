"""Checks of the shapes, types and values of targets, which several losses share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undrop.errors import TargetError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _type(target: Any) -> Any:
    return target.dtype if isinstance(target, Tensor) else type(target).__name__


def _check_given(target: Any) -> None:
    """Raise a ``TargetError`` if there are no targets."""
    if target is None:
        raise TargetError(
            "there are no targets: pass them after the inputs, objective(model, inputs, targets), or in "
            "a batch as a pair (inputs, targets) or a dict with labels."
        )


def check_class_indices(target: Tensor, shape: Sequence[int], classes: int) -> None:
    """Raise a ``TargetError`` if targets are not class indices of this shape."""
    _check_given(target)
    if not isinstance(target, Tensor) or target.dtype not in _INTEGERS:
        raise TargetError(
            f"targets must be class indices of an integer type, got {_type(target)}: for other targets "
            "choose a loss (loss=, in a shell --loss torch.nn:MSELoss), nn.MSELoss() for regression, "
            "nn.BCEWithLogitsLoss() for labels of 0 and 1, F.cross_entropy for class probabilities."
        )
    if tuple(target.shape) != tuple(shape):
        raise TargetError(
            f"targets must have shape {tuple(shape)} (the output's without the dimension of its "
            f"{classes} classes), got {_shape(target)}."
        )


def check_class_range(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise a ``TargetError`` if a target is neither a class nor ``ignore_index``."""
    if not target.numel():
        return
    low, high = (int(end) for end in target.aminmax())
    if low >= 0 and high < classes:  # the usual case, which is cheap to check
        return
    wrong = ((target < 0) | (target >= classes)) & not_ignored(target, ignore_index)
    if bool(wrong.any()):
        value = int(target[wrong][0])
        raise TargetError(
            f"targets must lie in 0 … {classes - 1} (or be ignore_index = {ignore_index}), got {value}."
        )


def not_ignored(target: Tensor, ignore_index: int) -> Tensor:
    """Return which class indices count.

    The comparison is between long integers, because uint8 has no -100.
    """
    return target.long() != ignore_index


def check_like_output(output: Tensor, target: Tensor) -> None:
    """Raise a ``TargetError`` if targets are not floating-point numbers of the output's shape."""
    _check_given(target)
    if not isinstance(target, Tensor) or not target.is_floating_point():
        raise TargetError(f"targets must be of a floating-point type, got {_type(target)}.")
    if target.shape != output.shape:
        raise TargetError(
            f"targets must have the output's shape {_shape(output)}, got {_shape(target)}."
        )


def check_range(target: Tensor, low: float, high: float) -> None:
    """Raise a ``TargetError`` if a target is outside of [low, high]."""
    wrong = ~((target >= low) & (target <= high))
    if bool(wrong.any()):
        raise TargetError(
            f"targets must lie in [{low:g}, {high:g}], got {float(target[wrong][0]):g}."
        )
