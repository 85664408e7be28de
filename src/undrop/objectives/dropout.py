"""Dropout as an objective: averaged over k samples, with or without its noise put back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from undrop.engines import Draw, Evaluation, Request, ScaledNoise, Weights, engine_named
from undrop.errors import OptionError
from undrop.intercept import Selection
from undrop.losses import Loss
from undrop.objectives.base import Objective, Plan
from undrop.options import check_int

__all__ = ["Dropout"]

NOISES = (None, "resampled", "analytic")


class Dropout(Objective):
    """Drop_k (Algorithm 1): the mean loss over k dropout masks; k = 1 is plain dropout.

    The covariance of the gradient noise shrinks as 1/k; ``noise`` puts back what averaging took:

    - "resampled" (Section 3.1): adds sqrt((1 - 1/k)/2)·[ℓ(η₁) - ℓ(η₂)] for two fresh masks;
    - "analytic" (Algorithm 4): adds sqrt(1 - 1/k)·∂ℓ/∂ε, the paper's ξ_approx, for ±1 noise.

    The masks are torch's own, from torch's global generator, so k = 1 is bit for bit the plain
    dropout step; with a ``generator`` undrop draws them. ``step.output`` is the first sample's: that
    is the hidden state which a recurrent model carries on (the paper does not say; its code carries
    the last one).

    Args:
        k: the number of masks.
        noise: None, "resampled" or "analytic".
        engine: how the analytic noise is had.
        mask: its mask structure, "as-declared" or "independent".
        sites: where the analytic noise enters; see :class:`~undrop.intercept.Selection`.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self,
        k: int = 1,
        *,
        noise: str | None = None,
        engine: str = "auto",
        mask: str = "as-declared",
        sites: str | Iterable[str] | Mapping[str, float] | None = None,
        loss: Loss | Callable[[Tensor, Any], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        if noise not in NOISES:
            raise OptionError(f"noise must be None, 'resampled' or 'analytic', got {noise!r}.")
        if engine == "exact":
            raise OptionError(
                "engine='exact' gives expectations, in which there is no noise to put back: use another."
            )
        self.k = check_int("k", k)
        self.noise = noise
        self.mask = mask
        self.engine = engine_named(engine)
        self.selection = Selection(sites)
        self.own_masks = generator is not None
        self._signs()  # refuses an unknown mask now, not at the first step

    @property
    def implicit_factor(self) -> float | None:
        """sqrt(1 - 1/k) with analytic noise."""
        return math.sqrt(1.0 - 1.0 / self.k) if self.noise == "analytic" else None

    def plan(self, model: nn.Module, inputs: Any, targets: Any) -> Plan:
        """K samples, then the noise that is put back."""
        sample = partial(self._sample, model, inputs, targets)
        plan: list[Callable[[], Evaluation]] = [partial(sample, "loss", 1.0 / self.k)] * self.k
        lost = 1.0 - 1.0 / self.k  # the share of the variance that averaging took
        if lost and self.noise == "resampled":
            factor = math.sqrt(lost / 2.0)
            plan += [partial(sample, "implicit", factor), partial(sample, "implicit", -factor)]
        if lost and self.noise == "analytic":
            plan.append(partial(self._analytic, model, inputs, targets, math.sqrt(lost)))
        return plan

    def _sample(
        self, model: nn.Module, inputs: Any, targets: Any, part: str, factor: float
    ) -> Evaluation:
        """Factor · ℓ(F(x; 1, η)) for a fresh mask."""
        field = None
        if self.own_masks:
            draw = Draw("dropout", "as-declared", Selection(), self.randomness)
            field = ScaledNoise(draw, 1.0)
        output, loss = self.passed(model, inputs, targets, field)
        total = loss if factor == 1.0 else factor * loss
        return Evaluation(total, {part: total.detach()}, output)

    def _analytic(self, model: nn.Module, inputs: Any, targets: Any, factor: float) -> Evaluation:
        weights = Weights(loss=0.0, explicit=0.0, implicit=factor)
        request = Request(model, inputs, targets, self.loss, "hessian", weights, self._signs())
        return self.engine.evaluate(request)

    def _signs(self) -> Draw:
        return Draw("sign", self.mask, self.selection, self.randomness)
