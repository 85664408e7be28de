"""Other regularizers, for comparison: R-Drop, Jacobian regularization and early dropout.

Those that evaluate the loss at moved weights are in ``moved_weights``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undrop.engines import Draw, Evaluation, ScaledNoise
from undrop.engines.antithetic import midpoint
from undrop.engines.base import WeightedParts
from undrop.errors import OptionError
from undrop.intercept import (
    Batch,
    Interception,
    RngSnapshot,
    Site,
    SiteAction,
    copied_buffers,
    keep_buffers,
    keep_statistics,
    logits_of,
    map_tensors,
)
from undrop.losses import Coefficients, Loss
from undrop.noise import draw as draw_noise
from undrop.objectives.base import Objective
from undrop.objectives.dropout import Dropout

LossLike = Loss | Callable[[Tensor, Any], Tensor] | None


def not_negative(name: str, value: float) -> float:
    """Return the value, if it is finite and not negative."""
    if not 0.0 <= value < float("inf"):
        raise OptionError(f"{name} must be finite and not negative, got {value}.")
    return value


class RDrop(Objective):
    """R-Drop: dropout with two masks, and the distance between the two predictions (Liang et al. 2021).

    ½(ℓ₁ + ℓ₂) + (weight/4)·[KL(p₁‖p₂) + KL(p₂‖p₁)], half of the original's total, with its α as
    ``weight``. For a loss whose gradient is p - y the sum of both divergences is Dℓ[F₁]·u - Dℓ[F₂]·u
    with u = F₁ - F₂, which every loss can compute.

    Args:
        weight: α ≥ 0.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self,
        weight: float = 1.0,
        *,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        self.weight = not_negative("weight", weight)

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield both passes in one evaluation: their distance joins them in one graph."""
        output = self._output(batch)
        with keep_statistics(batch.model):
            other = self._output(batch)
        one, two = logits_of(output), logits_of(other)
        u = one - two
        first, second = (self.loss.derivatives(f, u, batch.targets) for f in (one, two))
        loss = 0.5 * (first.loss + second.loss)
        consistency = 0.25 * self.weight * (first.directional - second.directional)
        parts = {"loss": loss.detach(), "consistency": consistency.detach()}
        yield Evaluation(loss + consistency, parts, lambda: output)

    def _output(self, batch: Batch) -> Any:
        """Return the output under a new mask."""
        with Interception(batch.model, dropout_mask(self)):
            output = batch.forward()
        self.loss.check(self.loss.sees(output), batch.targets)
        return output


class Jacobian(Objective):
    """½·weight·‖∂F/∂h‖² at one activation h, without dropout (Hoffman, Roberts & Yaida 2019).

    E‖J η‖² = ‖J‖² for η of random signs, and J η ≈ [F(h + δη) - F(h - δη)]/2δ: two plain passes.
    Token indices have no derivative, so h is the activation at a dropout site, by default the first
    one, which in a language model is the embedded words.

    Args:
        weight: λ ≥ 0.
        site: the name of the site; None is the first.
        step: δ, as a part of h's root mean square.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self,
        weight: float = 1e-4,
        *,
        site: str | None = None,
        step: float = 0.05,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        self.weight = not_negative("weight", weight)
        if not 0.0 < step <= 1.0:
            raise OptionError(f"step must lie in (0, 1], got {step}.")
        self.site = site
        self.step = step

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one evaluation of two passes."""
        names = self.sites(batch.model, batch.inputs).names
        if not names:
            yield self.plain(batch)
            return
        if self.site is not None and self.site not in names:
            raise OptionError(f"there is no site {self.site!r}: there are {', '.join(names)}.")
        shift = _Shift(self.site or names[0], self.step, self.generators)
        rng = RngSnapshot.of(batch.model, self.generators)
        buffers = copied_buffers(batch.model)
        with Interception(batch.model, partial(shift, 1.0)):
            output = batch.forward()
        if rng.moved():
            rng.restart()
        with keep_buffers(batch.model, buffers), Interception(batch.model, partial(shift, -1.0)):
            other = batch.forward()
        plus, minus = logits_of(output), logits_of(other)
        self.loss.check(plus, batch.targets)
        u = (plus - minus) / (2.0 * shift.distance)
        c = Coefficients(loss=1.0, quadratic=0.5 * self.weight, directional=0.0)
        total, parts = self.loss.combined(0.5 * (plus + minus), u, batch.targets, "identity", c)
        yield Evaluation(
            total, WeightedParts(c, parts), lambda: map_tensors(midpoint, output, other)
        )


class _Shift:
    """h + sign·δη at one site, and h at all others; with a sign it is a site action.

    The sign is an argument: a checkpointed pass asks again after the other pass has run.
    """

    def __init__(
        self, name: str, step: float, generator: Callable[[torch.device], torch.Generator]
    ) -> None:
        self.name = name
        self.step = step
        self.generator = generator
        self.distance = 0.0
        self._eta: Tensor | None = None

    def __call__(self, sign: float, site: Site, h: Tensor) -> Tensor:
        if site.name != self.name:
            return h
        if self._eta is None:
            like = h.detach()
            self.distance = self.step * float(like.square().mean().sqrt()) or self.step
            self._eta = draw_noise(
                "sign", tuple(h.shape), site.p, like=like, generator=self.generator(h.device)
            )
        return torch.add(h, self._eta, alpha=sign * self.distance)


class EarlyDropout(Dropout):
    """Dropout for the first ``until`` steps and none after (Liu et al. 2023).

    Args:
        until: the number of steps with dropout.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self,
        until: int = 1000,
        *,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        if not isinstance(until, int) or until < 0:
            raise OptionError(f"until must be a whole number of at least 0, got {until!r}.")
        self.until = until

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield dropout, or the plain loss."""
        if self.steps < self.until:
            yield from super().evaluations(batch)
        else:
            yield self.plain(batch)


def dropout_mask(objective: Objective) -> SiteAction:
    """Return one fixed dropout mask for all sites."""
    draw = Draw("dropout", "as-declared", objective.selection, objective.generators)
    return ScaledNoise(draw, 1.0)
