"""Training without dropout's help."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from undrop.engines import Evaluation
from undrop.errors import OptionError
from undrop.losses import Loss
from undrop.objectives.base import Objective, Plan
from undrop.options import as_float

__all__ = ["L2", "NoRegularization"]


class NoRegularization(Objective):
    """The loss alone, with every dropout of the model switched off (ε = 0)."""

    needs_dropout = False

    def plan(self, model: nn.Module, inputs: Any, targets: Any) -> Plan:
        """One pass without noise."""
        return [partial(self.plain, model, inputs, targets)]


class L2(NoRegularization):
    """The loss plus ``weight · Σ ‖W‖²`` over all trainable parameters, without dropout.

    Args:
        weight: λ ≥ 0.
        loss: as for every objective.
    """

    def __init__(
        self, weight: float, *, loss: Loss | Callable[[Tensor, Any], Tensor] | None = None
    ) -> None:
        super().__init__(loss=loss)
        if not 0.0 <= as_float(weight) < float("inf"):
            raise OptionError(f"the L2 weight must be finite and not negative, got {weight!r}.")
        self.weight = weight

    def plan(self, model: nn.Module, inputs: Any, targets: Any) -> Plan:
        """One pass without noise, and the squared norm."""
        return [partial(self._penalised, model, inputs, targets)]

    def _penalised(self, model: nn.Module, inputs: Any, targets: Any) -> Evaluation:
        plain = self.plain(model, inputs, targets)
        squares = (p.square().sum() for p in self.trained(model))
        penalty = self.weight * sum(squares, torch.zeros_like(plain.total))
        parts = {**plain.parts, "l2": penalty.detach()}
        return Evaluation(plain.total + penalty, parts, plain.output)
