"""Softmax cross-entropy along an output tangent, in closed form.

With p = softmax(z), u = ∂z/∂ε, v = u - Σ_k p_k u_k and t the target's distribution (one-hot, or
smoothed), a row's loss is ``ℓ = -Σ t log p``, and ``uᵀHu = Σ p v²``, ``∂ℓ/∂ε = Σ p u - Σ t u``.
For the total ``c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε`` the gradients are

    d/dz = c₀(p - t) + c₁ p(v² - Σ p v²) + c₂ p v,    d/du = 2c₁ p v + c₂ (p - t).

Everything is done in blocks of rows that stay in cache over all passes: passes over memory, and
fresh pages above all, are what costs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = [
    "Coefficients",
    "Rule",
    "Terms",
    "Work",
    "cross_entropy_combined",
    "cross_entropy_derivatives",
    "loss_gradient_",
    "loss_rows",
    "row_blocks",
    "tangent_gradients_",
    "tangent_rows",
    "working_dtype",
]

_BLOCK_ELEMENTS = 1 << 17  # of one buffer: the few that a block has stay in the cache of a core

Weight = float | Tensor  # the same for all rows, or a column of one for each


class Coefficients(NamedTuple):
    """What the total is made of: ``loss·ℓ + quadratic·uᵀHu + directional·∂ℓ/∂ε``."""

    loss: Weight
    quadratic: Weight
    directional: Weight

    def over(self, n: int) -> Coefficients:
        """The coefficients of the sums over n rows that make up their means."""
        return Coefficients(*(c / max(n, 1) for c in self))

    def part(self, rows: slice) -> Coefficients:
        """Those of some rows."""
        return Coefficients(*(c[rows] if isinstance(c, Tensor) else c for c in self))


class Rule(NamedTuple):
    """How rows are to be treated."""

    smoothing: float = 0.0  # of labels, as in torch
    form: str = "hessian"  # or "identity": ‖u‖² in place of uᵀHu
    coefficients: Coefficients | None = None  # None: no gradient is wanted
    seed: int | None = None  # of whatever is drawn, so that it is the same in the backward


class Terms(NamedTuple):
    """The terms of each row, and the mean Σ p u that v is u less of."""

    loss: Tensor
    quadratic: Tensor
    directional: Tensor
    mean: Tensor

    def sums(self) -> Tensor:
        """Σ over rows of ℓ, uᵀHu and ∂ℓ/∂ε, (3,)."""
        return torch.stack((self.loss.sum(), self.quadratic.sum(), self.directional.sum()))

    def part(self, rows: slice) -> Terms:
        """Those of some rows."""
        return Terms(*(x[rows] for x in self))

    @classmethod
    def joined(cls, parts: Sequence[Terms]) -> Terms:
        """Those of all rows."""
        return Terms(*(torch.cat(x) for x in zip(*parts, strict=True)))


class Work(NamedTuple):
    """Buffers (rows, classes): v, p v and p, of which the first two become d/dz and d/du."""

    v: Tensor
    pv: Tensor
    p: Tensor

    def part(self, rows: slice) -> Work:
        """Those of some rows."""
        return Work(*(x[rows] for x in self))


def row_blocks(rows: int, classes: int) -> list[slice]:
    """Cut rows into blocks whose buffers stay in cache."""
    most = max(1, _BLOCK_ELEMENTS // max(classes, 1))
    return [slice(start, min(start + most, rows)) for start in range(0, rows, most)]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which softmax is taken: half precision is not enough for sums over classes."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _softmax(z: Tensor, p: Tensor) -> Tensor:
    """Write softmax(z) to p; return log Σ exp z = max z - log(max p)."""
    top = z.amax(-1)
    torch.softmax(z, -1, out=p)
    return top.sub_(p.amax(-1).log_())


def _expected(x: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Σ_k t_k x_k of each row."""
    picked = x.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    if smoothing:
        picked.mul_(1.0 - smoothing).add_(x.mean(-1), alpha=smoothing)
    return picked


def _subtract_target_(x: Tensor, target: Tensor, smoothing: float, scale: Weight) -> None:
    """In place: ``x -= scale · t``."""
    if smoothing:
        x.sub_(scale * smoothing / x.shape[-1])
    value = x.new_ones(()) * scale * (smoothing - 1.0)
    x.scatter_add_(-1, target.unsqueeze(-1), value.expand(len(target), 1))


def loss_rows(z: Tensor, target: Tensor, smoothing: float, p: Tensor) -> Tensor:
    """ℓ of each row; p, which may be z itself, becomes softmax(z)."""
    wanted = _expected(z, target, smoothing)
    return _softmax(z, p) - wanted


def loss_gradient_(p: Tensor, target: Tensor, smoothing: float, c: Weight) -> None:
    """In place: p to ``d(c·ℓ)/dz = c(p - t)``."""
    _subtract_target_(p.mul_(c), target, smoothing, c)


def tangent_rows(z: Tensor, u: Tensor, target: Tensor, rule: Rule, work: Work) -> Terms:
    """The terms of each row along the tangent u; fills the buffers.

    Args:
        z: logits (rows, classes).
        u: their tangent.
        target: class of each row.
        rule: label smoothing and quadratic form.
        work: the buffers; ``work.v`` may be u itself and ``work.pv`` z itself.
    """
    wanted_z, wanted_u = (_expected(x, target, rule.smoothing) for x in (z, u))
    norm = torch.linalg.vecdot(u, u) if rule.form == "identity" else None
    log_sum = _softmax(z, work.p)
    mean = torch.mul(work.p, u, out=work.pv).sum(-1)
    v = torch.sub(u, mean.unsqueeze(-1), out=work.v)
    pv = torch.mul(work.p, v, out=work.pv)
    quadratic = torch.linalg.vecdot(pv, v) if norm is None else norm
    return Terms(log_sum - wanted_z, quadratic, mean - wanted_u, mean)


def tangent_gradients_(
    work: Work, terms: Terms, target: Tensor, rule: Rule, c: Coefficients
) -> None:
    """In place: ``work.v`` to d/dz and ``work.pv`` to d/du of the total with coefficients c."""
    v, pv, p = work
    c0, c1, c2 = (v.new_ones(()) * weight for weight in c)
    if rule.form == "identity":
        du = (v + terms.mean.unsqueeze(-1)).mul_(2.0 * c1).addcmul_(p, c2)
        torch.mul(pv, c2, out=v).addcmul_(p, c0)
        pv.copy_(du)
    else:
        # d/dz = p(c₀ - c₁Σpv²) + pv(c₁v + c₂) - c₀t
        v.mul_(c1).add_(c2).mul_(pv).addcmul_(p, c0 - c1 * terms.quadratic.unsqueeze(-1))
        pv.mul_(2.0 * c1).addcmul_(p, c2)
    _subtract_target_(v, target, rule.smoothing, c0)
    _subtract_target_(pv, target, rule.smoothing, c2)


def _sweep(
    z: Tensor, u: Tensor, target: Tensor, rule: Rule, gradients: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Sums over all rows, block by block; gradients in z and u go where told."""
    sums = z.new_zeros(3)
    blocks = row_blocks(*z.shape)
    scratch = z.new_empty((3, *z[blocks[0]].shape)) if blocks else z
    for rows in blocks:
        p, dz, du = scratch[:, : rows.stop - rows.start]
        if gradients is not None:
            dz, du = gradients[0][rows], gradients[1][rows]
        work = Work(dz, du, p)
        terms = tangent_rows(z[rows], u[rows], target[rows], rule, work)
        if rule.coefficients is not None:
            tangent_gradients_(work, terms, target[rows], rule, rule.coefficients)
        sums += terms.sums()
    return sums


class _Derivatives(torch.autograd.Function):
    """Means of ℓ, uᵀHu and ∂ℓ/∂ε.

    The backward starts again from z and u: that costs less than to write out p and v for it.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, u: Tensor, target: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(z, u, target)
        ctx.rule = rule
        loss, quadratic, directional = _sweep(z, u, target, rule) / max(len(target), 1)
        return loss, quadratic, directional

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, g_loss: Tensor, g_quadratic: Tensor, g_directional: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        z, u, target = ctx.saved_tensors
        incoming = Coefficients(*torch.stack((g_loss, g_quadratic, g_directional)).tolist())
        rule = ctx.rule._replace(coefficients=incoming.over(len(target)))
        gradients = torch.empty_like(z), torch.empty_like(u)
        _sweep(z, u, target, rule, gradients)
        return (*gradients, None, None)


class _Combined(torch.autograd.Function):
    """The weighted total, with its gradients formed in the forward, and the three means."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, u: Tensor, target: Tensor, rule: Rule
    ) -> tuple[Tensor, Tensor]:
        coefficients = rule.coefficients
        assert coefficients is not None
        n = len(target)
        gradients = None
        if any(ctx.needs_input_grad):
            gradients = torch.empty_like(z), torch.empty_like(u)
            ctx.save_for_backward(*gradients)
        scaled = coefficients.over(n) if gradients is not None else None
        means = _sweep(z, u, target, rule._replace(coefficients=scaled), gradients) / max(n, 1)
        ctx.mark_non_differentiable(means)
        return means @ means.new_tensor(coefficients), means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dz, du = ctx.saved_tensors
        if g.item() != 1.0:  # as it is wherever the total itself is what is minimised
            dz, du = dz * g, du * g
        return dz, du, None, None


def _kept(
    logits: Tensor, u: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As rows in the working type, without those whose target is ignored."""
    dtype = working_dtype(logits.dtype)
    target = target.reshape(-1)
    z, u = (x.reshape(len(target), logits.shape[-1]).to(dtype) for x in (logits, u))
    keep = target != ignore_index
    if not bool(keep.all()):
        z, u, target = z[keep], u[keep], target[keep]
    return z, u, target


def cross_entropy_derivatives(
    logits: Tensor,
    u: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    form: str = "hessian",
) -> tuple[Tensor, Tensor, Tensor]:
    """Means of ℓ, uᵀHu and ∂ℓ/∂ε over the targets that are not ignored (0 where all are).

    Differentiable once, in ``logits`` and ``u``. uᵀHu is a variance, hence never negative.

    Args:
        logits: (..., classes).
        u: their tangent ∂logits/∂ε, of the same shape.
        target: classes (...).
        ignore_index: the target that marks a row as not to be counted.
        label_smoothing: the share of the target's distribution that is spread over all classes.
        form: "hessian", or "identity" for ‖u‖² in place of uᵀHu.
    """
    rows = _kept(logits, u, target, ignore_index)
    loss, quadratic, directional = _Derivatives.apply(*rows, Rule(label_smoothing, form))
    return loss, quadratic, directional


def cross_entropy_combined(
    logits: Tensor,
    u: Tensor,
    target: Tensor,
    weights: tuple[float, float, float],
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    form: str = "hessian",
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The weighted total c₀·ℓ + c₁·uᵀHu + c₂·∂ℓ/∂ε, and its three means without weights or graph.

    The gradients are formed in the same sweep as the values: the backward only scales them.
    ``weights`` are c₀, c₁, c₂; the other arguments are those of ``cross_entropy_derivatives``.
    """
    rows = _kept(logits, u, target, ignore_index)
    rule = Rule(label_smoothing, form, Coefficients(*weights))
    total, (loss, quadratic, directional) = _Combined.apply(*rows, rule)
    return total, (loss, quadratic, directional)
