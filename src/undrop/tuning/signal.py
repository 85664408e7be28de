"""What a little more noise at each site would do to the validation loss, for all sites at once.

With r_i = E[u_iᵀHu_i]/σ_i² the explicit regularizer of site i is strength·σ_i²·r_i, and a training step
along its gradient takes γ·strength·σ_i²·⟨∇L_val, ∇r_i⟩ off the validation loss. The product with
v = ∇L_val is the slope of r_i along v, so it needs no second derivative:

    ⟨v, ∇r_i⟩ = [r_i(W + δv) - r_i(W - δv)] / 2δ + O(δ²).

Every r_i comes from one pass and one gradient: with c = H^½ξ for random ξ of unit covariance and
S = ⟨c, F⟩, r_i is the mean of (∂S/∂z_i)² over ξ, where z_i is a zero added to the site's noise. The
average over masks is exact, and c moves smoothly with W, so that both sides share one ξ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrop.engines import Draw, ZeroLeaves
from undrop.errors import NonFiniteError
from undrop.intercept import Interception, Selection, call, keep_statistics, logits_of, no_noise
from undrop.losses import Loss
from undrop.rng_snapshot import RngSnapshot

__all__ = ["Look", "Signal", "kept", "signal"]

STRIDE = 0.01
"""δ‖v‖ as a share of ‖W‖: the measured error of the slope is smallest near it in float32."""


class Signal(NamedTuple):
    """The validation loss, and its slopes along what regularizes."""

    loss: float
    """L_val without dropout."""
    slopes: dict[str, float]
    """⟨∇L_val, ∇r_i⟩ by site: positive where more noise helps."""
    sizes: dict[str, float]
    """r_i itself."""
    decay: float
    """⟨∇L_val, W⟩: positive where weight decay helps."""


@contextmanager
def kept(weights: Sequence[Tensor]) -> Iterator[None]:
    """Restore the weights, bit for bit, at the end."""
    saved = [w.detach().clone() for w in weights]
    try:
        yield
    finally:
        _put(weights, saved)


def _put(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(weights), list(values))


class Look(NamedTuple):
    """What to measure."""

    model: nn.Module
    loss: Loss
    mask: str
    selection: Selection
    seed: int
    """Of ξ: both sides share one."""


def signal(
    look: Look,
    weights: Sequence[Tensor],
    at: Sequence[Tensor],
    batch: tuple[Any, Any],
    held: tuple[Any, Any],
) -> Signal:
    """The slopes at the weights ``at``.

    Args:
        look: the model and how to look at it.
        weights: the parameters that are trained.
        at: the values to give them.
        batch: inputs and targets for r_i.
        held: inputs and targets for ∇L_val.
    """
    with keep_statistics(look.model), RngSnapshot() as replay, torch.enable_grad(), kept(weights):
        _put(weights, at)
        value, gradient = _gradient(look, weights, *held)
        delta = STRIDE * _norm(at) / max(_norm(gradient), 1e-30)
        sides = []
        for sign in (1.0, -1.0):
            replay.restart()
            _put(weights, torch._foreach_add(list(at), gradient, alpha=sign * delta))
            sides.append(_sizes(look, *batch))
    up, down = sides
    slopes = {name: (up[name] - down[name]) / (2.0 * delta) for name in up}
    sizes = {name: 0.5 * (up[name] + down[name]) for name in up}
    along = sum(float((g.double() * w.double()).sum()) for g, w in zip(gradient, at, strict=True))
    return Signal(value, slopes, sizes, along)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack(torch._foreach_norm(list(tensors))).double().norm())


def _gradient(
    look: Look, weights: Sequence[Tensor], inputs: Any, targets: Any
) -> tuple[float, list[Tensor]]:
    """L_val without dropout, and its gradient."""
    with Interception(look.model, no_noise):
        logits = logits_of(call(look.model, inputs))
    look.loss.check(logits, targets)
    loss = look.loss.value(logits, targets)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise NonFiniteError(
            f"the loss of a validation batch is {value}: look for NaN or infinity in it and in "
            f"the weights of {type(look.model).__name__}."
        )
    return value, list(
        torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    )


def _sizes(look: Look, inputs: Any, targets: Any) -> dict[str, float]:
    """r_i of every site, for one ξ and the mean over masks."""
    field = ZeroLeaves(Draw("sign", look.mask, look.selection, _no_draw))
    with Interception(look.model, field):
        logits = logits_of(call(look.model, inputs))
    look.loss.check(logits, targets)
    generator = torch.Generator(logits.device).manual_seed(look.seed)
    left, right = _probes(look.loss, logits, targets, generator)
    first = _pulled(logits, left, field.leaves, keep=right is not left)
    second = first if right is left else _pulled(logits, right, field.leaves, keep=False)
    count = float(look.loss.count(logits, targets))
    return {
        site.name: float((a.double() * b.double()).sum()) / count
        for site, a, b in zip(field.sites, first, second, strict=True)
    }


def _no_draw(device: torch.device) -> torch.Generator:
    raise AssertionError("zero leaves draw nothing")


def _pulled(logits: Tensor, c: Tensor, leaves: list[Tensor], *, keep: bool) -> list[Tensor]:
    """∂⟨c, F⟩/∂z of every leaf z."""
    return list(
        torch.autograd.grad(
            logits, leaves, c, retain_graph=keep, allow_unused=True, materialize_grads=True
        )
    )


def _probes(
    loss: Loss, logits: Tensor, targets: Any, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Two vectors c, c' with E[c c'ᵀ] = Σ_terms H: twice H^½ξ where the loss has it, or ξ and Hξ."""
    at = logits.detach()
    xi = torch.empty_like(at).bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)
    root = loss.root(at, targets, xi)
    if root is not None:
        return root, root
    u = xi.clone().requires_grad_()
    quadratic = loss.derivatives(at, u, targets).quadratic
    (product,) = torch.autograd.grad(quadratic, u)
    return xi, 0.5 * float(loss.count(at, targets)) * product
