"""Two plain passes at +ε₀ and -ε₀ with the same η: any kernel, no forward mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from undrop.engines.base import Engine, Evaluation, Request, weighted_parts
from undrop.engines.draw import ScaledNoise
from undrop.engines.fraction import Carried
from undrop.errors import OptionError
from undrop.intercept import Interception, RngSnapshot, keep_statistics, map_tensors, silent

__all__ = ["EPSILON", "EPSILON_HALF", "Antithetic", "middle"]

EPSILON = 0.05
"""ε₀ for float32 and float64: a relative error of the gradient below 1e-3, and a margin to rounding."""
EPSILON_HALF = 0.25
"""ε₀ for half precision, where rounding and truncation meet at 2 to 3 %. Measured by
benchmarks/epsilon.py; docs/engines.md shows the curves."""


class Antithetic(Engine):
    """u ≈ (F₊ - F₋)/2ε₀ and F ≈ (F₊ + F₋)/2, each to O(ε₀²), and one backward pass through both.

    Args:
        epsilon: ε₀; None takes what suits the precision. Larger is less exact, smaller loses digits.
    """

    name = "antithetic"

    def __init__(self, epsilon: float | None = None) -> None:
        if epsilon is not None and not 0.0 < epsilon <= 1.0:
            raise OptionError(f"epsilon must lie in (0, 1], got {epsilon}.")
        self.epsilon = epsilon

    def evaluate(self, request: Request) -> Evaluation:
        """The weighted total over both passes; a third serves examples that carry no tangent."""
        carried = Carried(request)
        if carried.whole:
            output, logits, u = self._both(request)
            total, parts = request.loss.combined(
                logits, u, request.targets, request.form, request.weights
            )
            return Evaluation(total, weighted_parts(request.weights, *parts), output)
        mine = replace(
            request, inputs=carried.first(carried.inputs), targets=carried.first(carried.targets)
        )
        output, logits, u = self._both(mine)
        others = replace(
            request, inputs=carried.beside(carried.inputs), targets=carried.beside(carried.targets)
        )
        with keep_statistics(request.model), Interception(request.model, silent):
            other_output, beside = others.run()
        total, parts = carried.combined(request, logits, u, beside)
        joined = carried.joined(output, other_output)
        return Evaluation(total, weighted_parts(request.weights, *parts), joined)

    def _both(self, request: Request) -> tuple[Any, Tensor, Tensor]:
        """What the model returns, and of that what the loss sees: F and u."""
        epsilon = _suitable(request.model) if self.epsilon is None else self.epsilon
        replay = RngSnapshot.of(request.model, request.draw.generator)
        with Interception(request.model, ScaledNoise(request.draw, epsilon)) as first:
            up, plus = request.run()
        if first.drew:
            replay.restart()
        with (
            keep_statistics(request.model),
            Interception(request.model, ScaledNoise(request.draw, -epsilon)),
        ):
            down, minus = request.run()
        u = (plus - minus) * (0.5 / epsilon)
        return map_tensors(middle, up, down), (plus + minus) * 0.5, u


def _suitable(model: nn.Module) -> float:
    """ε₀ for the precision that the model runs in."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is None:
        return EPSILON
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return EPSILON_HALF if half or torch.is_autocast_enabled(weight.device.type) else EPSILON


def middle(a: Tensor, b: Tensor) -> Tensor:
    """What lies between the two passes: the noise-free value to O(ε₀²)."""
    return (a + b) * 0.5 if a.is_floating_point() else a
