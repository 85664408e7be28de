"""Other objectives, for comparison: none, L2, R-Drop, Jacobian, early dropout, SAM, weight noise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undrop.autodiff import gradients
from undrop.engines import Evaluation, WeightedParts, dropout_masks
from undrop.engines.antithetic import midpoint
from undrop.errors import OptionError
from undrop.intercept import (
    Batch,
    Interception,
    RngSnapshot,
    Site,
    copied_buffers,
    keep_buffers,
    keep_statistics,
    logits_of,
    map_tensors,
    no_noise,
)
from undrop.losses import Coefficients, Loss
from undrop.noise import draw_noise
from undrop.objectives.base import Objective
from undrop.objectives.dropout import Dropout
from undrop.options import as_float

LossLike = Loss | Callable[[Tensor, Any], Tensor] | None


def not_negative(name: str, value: float) -> float:
    """Return the value, if it is finite and not negative."""
    if not 0.0 <= as_float(value) < float("inf"):
        raise OptionError(f"{name} must be finite and not negative, got {value!r}.")
    return value


class NoRegularization(Objective):
    """The loss alone, with every dropout of the model switched off (ε = 0)."""

    needs_dropout = False

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one pass without noise."""
        yield self.plain_loss(batch)


class L2(NoRegularization):
    """The loss plus ``weight · Σ ‖W‖²`` over all trainable parameters, without dropout.

    Args:
        weight: λ ≥ 0.
        loss: as for every objective.
    """

    def __init__(self, weight: float, *, loss: LossLike = None) -> None:
        super().__init__(loss=loss)
        self.weight = not_negative("the L2 weight", weight)

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one pass without noise, and the squared norm."""
        plain = self.plain_loss(batch)
        squares = (p.square().sum() for p in self.trainable_parameters(batch.model))
        penalty = self.weight * sum(squares, torch.zeros_like(plain.total))
        parts = {**plain.parts, "l2": penalty.detach()}
        yield Evaluation(plain.total + penalty, parts, plain.make_output)


class RDrop(Objective):
    """R-Drop: dropout with two masks, and the distance between the two predictions (Liang et al. 2021).

    ½(ℓ₁ + ℓ₂) + (weight/4)·[KL(p₁‖p₂) + KL(p₂‖p₁)]. This is half of the total in their paper, whose α
    is ``weight``. For a loss whose gradient is p - y, the sum of both divergences is Dℓ[F₁]·u - Dℓ[F₂]·u
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
        """Yield one evaluation of both passes, because their distance needs both graphs."""
        output = self._output(batch)
        with keep_statistics(batch.model):
            other = self._output(batch)
        one, two = logits_of(output), logits_of(other)
        u = one - two
        first, second = (batch.loss.derivatives(f, u, batch.targets) for f in (one, two))
        loss = 0.5 * (first.loss + second.loss)
        consistency = 0.25 * self.weight * (first.directional - second.directional)
        parts = {"loss": loss.detach(), "consistency": consistency.detach()}
        yield Evaluation(loss + consistency, parts, lambda: output)

    def _output(self, batch: Batch) -> Any:
        """Return the output under a new mask."""
        with Interception(batch.model, dropout_masks(self.generators, self.selection)):
            output = batch.forward()
        batch.loss.check(batch.loss.select(output), batch.targets)
        return output


class Jacobian(Objective):
    """½·weight·‖∂F/∂h‖² at one activation h, without dropout (Hoffman, Roberts & Yaida 2019).

    E‖J η‖² = ‖J‖² for η of random signs, and J η ≈ [F(h + δη) - F(h - δη)]/2δ: two plain passes.
    Token indices have no derivative, so h is the activation at a dropout site, by default the first
    one, which in a language model is the token embeddings.

    Args:
        weight: λ ≥ 0.
        site: the name of the site; None uses the first site.
        step: δ, relative to the root mean square of h.
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
            yield self.plain_loss(batch)
            return
        if self.site is not None and self.site not in names:
            raise OptionError(f"there is no site {self.site!r}: the sites are {', '.join(names)}.")
        shift = _Shift(self.site or names[0], self.step, self.generators)
        rng = RngSnapshot.of(batch.model, self.generators)
        buffers = copied_buffers(batch.model)
        with Interception(batch.model, partial(shift, 1.0)):
            output = batch.forward()
        if rng.changed_generators():
            rng.restore()
        with keep_buffers(batch.model, buffers), Interception(batch.model, partial(shift, -1.0)):
            other = batch.forward()
        plus, minus = logits_of(output), logits_of(other)
        batch.loss.check(plus, batch.targets)
        u = (plus - minus) / (2.0 * shift.distance)
        c = Coefficients(loss=1.0, quadratic=0.5 * self.weight, directional=0.0)
        total, parts = batch.loss.combined(0.5 * (plus + minus), u, batch.targets, "identity", c)
        yield Evaluation(
            total, WeightedParts(c, parts), lambda: map_tensors(midpoint, output, other)
        )


class _Shift:
    """Turns h into h + sign·δη at one site; with a fixed sign it is a site action.

    The sign is an argument, because a checkpointed pass runs again after the other pass has run.
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
    """Dropout for the first ``until`` steps, and none after that (Liu et al. 2023).

    Args:
        until: the number of steps with dropout.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self, until: int = 1000, *, loss: LossLike = None, generator: torch.Generator | None = None
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
            yield self.plain_loss(batch)


class SAM(Objective):
    """Sharpness-aware minimization (Foret et al. 2021), on top of the model's dropout.

    The gradient is ∇ℓ at W + radius·g/‖g‖, where g = ∇ℓ(W), with the same dropout mask for both.
    ``step.total`` is linear in W and has this gradient, so training needs no second step, no closure and
    no special optimizer.

    Args:
        radius: ρ ≥ 0.
        loss: as for every objective.
        generator: as for every objective.
    """

    def __init__(
        self,
        radius: float = 0.05,
        *,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        self.radius = not_negative("radius", radius)

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one evaluation: two passes with a backward pass each."""
        mask = dropout_masks(self.generators, self.selection)
        weights = self.trainable_parameters(batch.model)
        output, loss = self.forward_and_loss(batch, mask)
        ascent = gradients(loss, weights)
        norm = torch.stack([g.norm() for g in ascent]).norm()
        factor = self.radius / (norm + 1e-12)
        with _moved(weights, [g * factor for g in ascent]), keep_statistics(batch.model):
            _, perturbed = self.forward_and_loss(batch, mask)
            gradient = gradients(perturbed, weights)
        value = perturbed.detach()
        total = _with_gradient(value, weights, gradient)
        yield Evaluation(total, {"loss": value}, lambda: output)


class WeightNoise(Objective):
    """Noise on the weights in both directions, without dropout (NSO: Zhang, Li & Ju 2024).

    The gradient is ½[∇ℓ(W + U) + ∇ℓ(W - U)] with U drawn from N(0, scale²) for every weight. In
    expectation it is the gradient of ℓ + ½·scale²·tr ∇²ℓ to second order; the two directions cancel the
    first order in every draw.

    Args:
        scale: σ ≥ 0, the standard deviation of U.
        loss: as for every objective.
        generator: as for every objective.
    """

    needs_dropout = False

    def __init__(
        self,
        scale: float = 0.01,
        *,
        loss: LossLike = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(loss=loss, generator=generator)
        self.scale = not_negative("scale", scale)

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one evaluation: two passes with a backward pass each; the output is the one at W + U."""
        weights = self.trainable_parameters(batch.model)
        noise = [self._draw(w) for w in weights]
        with _moved(weights, noise):
            output, plus = self.forward_and_loss(batch, no_noise)
            gradient = gradients(plus, weights)
        with _moved(weights, [-u for u in noise]), keep_statistics(batch.model):
            _, minus = self.forward_and_loss(batch, no_noise)
            gradient = [
                0.5 * (one + two)
                for one, two in zip(gradient, gradients(minus, weights), strict=True)
            ]
        value = 0.5 * (plus.detach() + minus.detach())
        total = _with_gradient(value, weights, gradient)
        yield Evaluation(total, {"loss": value}, lambda: output)

    def _draw(self, weight: Tensor) -> Tensor:
        source = self.generators(weight.device)
        noise = torch.empty_like(weight, requires_grad=False)
        return noise.normal_(0.0, self.scale, generator=source)


def _with_gradient(value: Tensor, weights: Sequence[Tensor], gradient: Sequence[Tensor]) -> Tensor:
    """Return a scalar with this value and this gradient; it is linear in the weights."""
    products = ((w * g).sum() for w, g in zip(weights, gradient, strict=True))
    linear = sum(products, value.new_zeros(()))
    return value + (linear - linear.detach())


@contextlib.contextmanager
def _moved(weights: Sequence[Tensor], by: Sequence[Tensor]) -> Iterator[None]:
    """Move the weights within a block, and restore them bit for bit afterwards."""
    kept = [w.detach().clone() for w in weights]
    with torch.no_grad():
        torch._foreach_add_(list(weights), list(by))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(weights), kept)
