"""Find every dropout of a model by running it, and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import nn

from undrop.errors import NoDropoutError
from undrop.intercept.adapters import adapter_hint
from undrop.intercept.interception import Interception, no_noise
from undrop.intercept.model_call import call
from undrop.intercept.running_statistics import keep_buffers
from undrop.intercept.site import Sites
from undrop.intercept.wrappers import unwrapped
from undrop.rng_snapshot import RngSnapshot

__all__ = ["has_idle_dropout", "in_training", "preserve_model", "sites"]

_LOOKING = RLock()  # held while a model is in another mode than the one its owner put it in


def sites(model: nn.Module, inputs: Any) -> Sites:
    """List every dropout that a forward pass of the model uses.

    The model is run twice without gradients, in train mode with its dropout switched off, and in
    eval mode to see which sites are active there. Its mode, its buffers and torch's random state
    are restored. Dropouts with p = 0 are not sites.

    Args:
        model: any module.
        inputs: a tensor, a tuple (positional) or a dict (keyword arguments).

    Returns:
        A sequence of records with ``name``, ``kind``, ``p``, ``mask``, ``shape`` and
        ``active_in_eval``; it prints as a table.

    Raises:
        NoDropoutError: if the pass uses no active dropout.
    """
    model = unwrapped(model)
    with _LOOKING, preserve_model(model):
        if not model.training:
            model.train()
        found = _met(model, inputs)
        model.eval()
        active = _met(model, inputs).names
    if not found:
        raise NoDropoutError(_nothing_found(model))
    return found.flagged(active)


def has_idle_dropout(model: nn.Module, inputs: Any) -> bool:
    """Return whether a pass uses dropout with p = 0, and none with p > 0."""
    with preserve_model(model), torch.no_grad(), Interception(model, no_noise) as mode:
        call(model, inputs)
    return mode.idle and not mode.sites


def in_training(model: nn.Module) -> bool:
    """Whether the model is in train mode, when no other thread is looking for its sites."""
    if model.training:
        return True
    with _LOOKING:
        return model.training


def _met(model: nn.Module, inputs: Any) -> Sites:
    with torch.no_grad(), Interception(model, no_noise) as mode:
        call(model, inputs)
    return Sites(mode.sites)


def _nothing_found(model: nn.Module) -> str:
    idle = [
        f"{name or type(module).__name__!r} (p = {module.p:g})"
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd)
    ]
    if not idle:
        hint = adapter_hint(model) or "add one, e.g. nn.Dropout(0.1)"
    else:
        hint = (
            f"it has {', '.join(idle[:3])}, but none was active in the pass: check p and its mode"
        )
    return f"no active dropout was met in a forward pass of {type(model).__name__}: {hint}."


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module, all buffers and the global random state at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with keep_buffers(model), RngSnapshot():
            yield
    finally:
        for module, training in modes:
            module.training = training
