"""Saying once if dropout has no effect: the noise of every site is lost before the output."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_log = logging.getLogger("undrop")

_EXPLICIT, _IMPLICIT = 1e-10, 1e-5
"""Shares of the loss that rounding alone can make of uᵀHu and of ∂ℓ/∂ε."""


def fingerprint(parameters: Sequence[Tensor]) -> Tensor:
    """One number that changes with the weights; sparse ones, which have no norm, do not count."""
    dense = [p.detach() for p in parameters if p.layout is torch.strided]
    if not dense:  # only the inputs are trained
        return torch.zeros(())
    norms = torch._foreach_norm(dense, 1)
    dtype = torch.float32 if norms[0].device.type == "mps" else torch.float64  # MPS has no float64
    return torch.stack([norm.to(dtype) for norm in norms]).sum()


class EffectCheck:
    """Watches the first steps of a training until dropout has an effect on the output, u ≠ 0.

    One step with u = 0 is normal: LoRA starts with B = 0. If u is still 0 after the weights have
    changed, one warning says so. Micro-batches of one step, and steps with a learning rate of 0, do
    not count.
    """

    def __init__(self) -> None:
        self.settled = False
        """Whether there is nothing left to say."""
        self._weights: float | None = None  # at the first step without an effect

    def add(
        self, parts: Mapping[str, float], weights: float, model: str, sites: Sequence[str]
    ) -> None:
        """Take the parts of a step, and the fingerprint of the weights that it was taken at."""
        if not has_no_effect(parts):
            self.settled = True
        elif self._weights is None:
            self._weights = weights
        elif weights != self._weights:
            self.settled = True
            more = f" and {len(sites) - 3} more" if len(sites) > 3 else ""
            _log.warning(
                "dropout had no effect on the output of %s in two successive steps (u = 0 at %s%s): "
                "look for zero weights, a frozen adapter or a detach() behind these sites.",
                model,
                ", ".join(sites[:3]),
                more,
            )


def has_no_effect(parts: Mapping[str, float]) -> bool:
    """Whether the regularizers of a step are 0, up to rounding."""
    if not {"explicit", "implicit"} & parts.keys():
        return False
    loss = abs(parts.get("loss", 0.0))
    explicit, implicit = abs(parts.get("explicit", 0.0)), abs(parts.get("implicit", 0.0))
    return explicit <= _EXPLICIT * loss and implicit <= _IMPLICIT * loss
