"""Softmax cross-entropy along an output tangent, in closed form.

With p = softmax(z), u = ∂z/∂ε, v = u - Σ_k p_k u_k and t the target's distribution (one-hot, or
smoothed), a row's loss is ``ℓ = -Σ t log p``, and ``uᵀHu = Σ p v²``, ``∂ℓ/∂ε = Σ p u - Σ t u``.
For the total ``c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε`` the gradients are

    d/dz = c₀(p - t) + c₁ p(v² - Σ p v²) + c₂ p v,    d/du = 2c₁ p v + c₂ (p - t).

Each row has a weight: 1/N for a target that counts, 0 for an ignored one. No value is read from the
device, so a step on a GPU never waits. Rows without a tangent have only the loss.

The rows are processed in blocks that stay in the cache, because access to memory, above all to newly
allocated memory, takes most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 17  # in one buffer, so that all buffers of a block fit into a core's cache

Weight = float | Tensor  # a number, a 0-d tensor, or a column with one entry for each row


class Derivatives(NamedTuple):
    """Derivatives of a loss along the output tangent u = ∂F/∂ε, for each row or as means over rows."""

    loss: Tensor  # ℓ(F)
    quadratic: Tensor  # uᵀHu, or the requested form
    directional: Tensor  # ∂ℓ/∂ε = Dℓ[F]·u


Means = Tensor | Derivatives  # of ℓ, uᵀHu and ∂ℓ/∂ε; the tensor is (3,)


class Coefficients(NamedTuple):
    """The total is ``loss·ℓ + quadratic·uᵀHu + directional·∂ℓ/∂ε``."""

    loss: Weight
    quadratic: Weight
    directional: Weight

    def times(self, weight: Tensor) -> Coefficients:
        """Return the coefficients times the weights of the rows (rows,), as columns."""
        return Coefficients(*(c * weight.unsqueeze(-1) for c in self))

    def part(self, rows: slice) -> Coefficients:
        """Return the coefficients of some rows, if they are columns."""
        return Coefficients(*(c[rows] if isinstance(c, Tensor) else c for c in self))

    def total(self, means: Means) -> Tensor:
        """Return the total, from the means of ℓ, uᵀHu and ∂ℓ/∂ε."""
        loss, quadratic, directional = means
        total = loss * self.loss if isinstance(self.loss, Tensor) or self.loss != 1.0 else loss
        for c, mean in ((self.quadratic, quadratic), (self.directional, directional)):
            if isinstance(c, Tensor):
                total = total + c * mean
            elif c:
                total = torch.add(total, mean, alpha=c)
        return total.clone() if total is loss else total


class SoftmaxOptions(NamedTuple):
    """What to compute for rows of logits."""

    smoothing: float = 0.0  # label smoothing, as in torch
    form: str = "hessian"  # or "identity": ‖u‖² in place of uᵀHu
    coefficients: Coefficients | None = None  # None: compute no gradient
    ignore_index: int = -100  # the target that marks an ignored row


class RowTerms(NamedTuple):
    """The terms of each row, and the mean Σ p u in v = u - Σ p u."""

    loss: Tensor
    quadratic: Tensor
    directional: Tensor
    mean: Tensor

    def sums(self, weight: Tensor) -> Tensor:
        """Return the sums over rows of weight (rows,) times ℓ, uᵀHu and ∂ℓ/∂ε, (3,).

        A row of weight 0 does not count, even if its logits are not finite.
        """
        terms = torch.stack((self.loss, self.quadratic, self.directional))
        return terms.masked_fill(weight == 0.0, 0.0).mul_(weight).sum(-1)

    @classmethod
    def joined(cls, parts: Sequence[RowTerms]) -> RowTerms:
        """Concatenate the terms of parts of the rows."""
        if len(parts) == 1:
            return parts[0]
        return RowTerms(*(torch.cat(x) for x in zip(*parts, strict=True)))


class WorkBuffers(NamedTuple):
    """Buffers (rows, classes) for v, p v and p; the first two become d/dz and d/du."""

    v: Tensor
    pv: Tensor
    p: Tensor


class GradientBuffers(NamedTuple):
    """Buffers for gradients; ``dz_tangent`` may share memory with u, the other two with z."""

    dz_plain: Tensor  # d/dz of the rows without a tangent
    dz_tangent: Tensor  # d/dz of the rows with a tangent
    du: Tensor  # d/du


def row_blocks(rows: int, classes: int) -> list[slice]:
    """Cut rows into blocks whose buffers stay in the cache."""
    most = max(1, _BLOCK_ELEMENTS // max(classes, 1))
    return [slice(start, min(start + most, rows)) for start in range(0, rows, most)]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute softmax in: half precision is not enough for sums over classes."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def row_weights(target: Tensor, ignore_index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the class of each row (0 if ignored), and its weight in the mean over N targets."""
    ignored = target == ignore_index
    weight = ignored.logical_not().to(dtype)
    return target.masked_fill(ignored, 0), weight / weight.sum().clamp_(min=1.0)


def _softmax(z: Tensor, p: Tensor) -> Tensor:
    """Write softmax(z) to p; return log Σ exp z = max z - log(max p)."""
    top = z.amax(-1)
    torch.softmax(z, -1, out=p)
    return top.sub_(p.amax(-1).log_())


def expected(x: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return Σ_k t_k x_k of each row, where t is the target's distribution."""
    picked = x.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (1.0 - smoothing) * picked + smoothing * x.mean(-1) if smoothing else picked


def _subtract_target_(x: Tensor, target: Tensor, smoothing: float, scale: Weight) -> None:
    """Compute ``x -= scale · t`` in place."""
    if smoothing:
        x.sub_(scale * smoothing / x.shape[-1])
    value = x.new_ones(()) * scale * (smoothing - 1.0)
    x.scatter_add_(-1, target.unsqueeze(-1), value.expand(len(target), 1))


def loss_rows(
    z: Tensor, target: Tensor, smoothing: float, dz: Tensor, c: Weight | None
) -> RowTerms:
    """Return the terms of rows without a tangent, and write d(c·ℓ)/dz = c(p - t) to dz.

    dz may be z itself; if c is None, it is not computed.
    """
    target_z = expected(z, target, smoothing)
    loss = _softmax(z, dz) - target_z
    if c is not None:
        _subtract_target_(dz.mul_(c), target, smoothing, c)
    zero = torch.zeros_like(loss)
    return RowTerms(loss, zero, zero, zero)


def tangent_rows(
    z: Tensor, u: Tensor, target: Tensor, options: SoftmaxOptions, work: WorkBuffers
) -> RowTerms:
    """Return the terms of each row of logits z along their tangent u, and fill the buffers.

    ``work.v`` may be u itself and ``work.pv`` z itself.
    """
    target_z, target_u = (expected(x, target, options.smoothing) for x in (z, u))
    norm = torch.linalg.vecdot(u, u) if options.form == "identity" else None
    log_sum = _softmax(z, work.p)
    mean = torch.mul(work.p, u, out=work.pv).sum(-1)
    v = torch.sub(u, mean.unsqueeze(-1), out=work.v)
    pv = torch.mul(work.p, v, out=work.pv)
    quadratic = torch.linalg.vecdot(pv, v) if norm is None else norm
    return RowTerms(log_sum - target_z, quadratic, mean - target_u, mean)


def tangent_gradients_(
    work: WorkBuffers, terms: RowTerms, target: Tensor, options: SoftmaxOptions, c: Coefficients
) -> None:
    """Replace ``work.v`` by d/dz and ``work.pv`` by d/du of the total with the coefficients c."""
    v, pv, p = work
    c0, c1, c2 = (v.new_ones(()) * weight for weight in c)
    if options.form == "identity":
        du = (v + terms.mean.unsqueeze(-1)).mul_(2.0 * c1).addcmul_(p, c2)
        torch.mul(pv, c2, out=v).addcmul_(p, c0)
        pv.copy_(du)
    else:
        # d/dz = p(c₀ - c₁Σpv²) + pv(c₁v + c₂) - c₀t
        v.mul_(c1).add_(c2).mul_(pv).addcmul_(p, c0 - c1 * terms.quadratic.unsqueeze(-1))
        pv.mul_(2.0 * c1).addcmul_(p, c2)
    _subtract_target_(v, target, options.smoothing, c0)
    _subtract_target_(pv, target, options.smoothing, c2)


class OutputRows(NamedTuple):
    """Rows of features with their targets; for a loss on logits, the features are the logits."""

    features: Tensor  # (rows, features)
    tangent: Tensor | None  # of all rows, or of the last ones; None if no row has one
    target: Tensor  # (rows,)
    weight: Tensor  # of each row in the mean: 1/N, or 0 for an ignored target

    @property
    def plain(self) -> int:
        """The number of rows without a tangent, which come first."""
        return len(self.target) - (0 if self.tangent is None else len(self.tangent))

    def of_tangent(self, which: slice) -> slice:
        """Return the slice of the tangent for a slice of the rows."""
        return slice(max(which.start - self.plain, 0), max(which.stop - self.plain, 0))

    def part(self, which: slice) -> OutputRows:
        """Return some of the rows."""
        tangent = None if self.tangent is None else self.tangent[self.of_tangent(which)]
        tangent = tangent if tangent is not None and len(tangent) else None
        return OutputRows(self.features[which], tangent, self.target[which], self.weight[which])

    def blocks(self) -> list[tuple[slice, slice | None]]:
        """Return blocks of rows, each with its slice of the tangent; None for rows without a tangent."""
        plain, classes = self.plain, self.features.shape[-1]
        without = [(rows, None) for rows in row_blocks(plain, classes)]
        with_tangent = row_blocks(len(self.target) - plain, classes)
        return [*without, *((slice(plain + b.start, plain + b.stop), b) for b in with_tangent)]


def sweep(
    rows: OutputRows, options: SoftmaxOptions, c: Coefficients | None, to: GradientBuffers | None
) -> Tensor:
    """Return the means of ℓ, uᵀHu and ∂ℓ/∂ε for logits z (the features) and their tangent u.

    ``c`` contains the coefficients of each row. If it is not None, the gradients of the total with
    respect to z and u are written to ``to``.
    """
    z_all, u_all = rows.features, rows.tangent
    parts, blocks = [], rows.blocks()
    longest = max((block.stop - block.start for block, _ in blocks), default=0)
    buffers = [z_all.new_empty((longest, z_all.shape[-1])) for _ in range(1 if to else 3)]
    for block, of_u in blocks:
        p, *rest = (buffer[: block.stop - block.start] for buffer in buffers)
        z, target = z_all[block], rows.target[block]
        if of_u is None or u_all is None:
            dz = rest[0] if to is None else to.dz_plain[block]
            weight = None if c is None else c.part(block).loss
            terms = loss_rows(z, target, options.smoothing, dz, weight)
        else:
            dz, du = rest if to is None else (to.dz_tangent[of_u], to.du[of_u])
            work = WorkBuffers(dz, du, p)
            terms = tangent_rows(z, u_all[of_u], target, options, work)
            if c is not None:
                tangent_gradients_(work, terms, target, options, c.part(block))
        parts.append(terms)
    return RowTerms.joined(parts).sums(rows.weight) if parts else z_all.new_zeros(3)


_FEW = 1 << 15  # with at most this many logits, the number of calls dominates the cost


def _few_logits(
    z: Tensor, u: Tensor, target: Tensor, c: Any
) -> tuple[Derivatives, tuple[Tensor, Tensor]]:
    """Compute the same as ``sweep_with_gradients``, in as few calls as possible.

    It is for the Hessian and few logits. The coefficients c are numbers, u belongs to the last
    rows, and all N rows count, each with the weight w = 1/N.
    """
    n = len(z)
    w, plain = 1.0 / n, n - len(u)
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    first = p.scatter_add(-1, target.unsqueeze(-1), p.new_full((n, 1), -1.0)).mul_(w)  # w(p - t)
    loss = torch.nn.functional.nll_loss(log_p, target)
    p_u, first_u = (p[plain:], first[plain:]) if plain else (p, first)
    v = u - (p_u * u).sum(-1, keepdim=True)
    pv = (p_u * v).mul_(w)
    pvv = pv * v
    quadratic = pvv.sum(-1, keepdim=True)
    means = Derivatives(loss, quadratic.sum(), (first_u * u).sum())
    du = (pv * (2.0 * c.quadratic)).add_(first_u, alpha=c.directional)
    dz = first if c.loss == 1.0 else first.mul_(c.loss)
    dz_u = dz[plain:] if plain else dz
    dz_u.add_(pvv.addcmul_(p_u, quadratic, value=-1.0), alpha=c.quadratic)
    dz_u.add_(pv, alpha=c.directional)
    return means, (dz, du)


def sweep_with_gradients(
    rows: OutputRows, options: SoftmaxOptions
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the means of the three terms, and the gradients of the total in the logits and in u."""
    assert options.coefficients is not None
    u = rows.features[:0] if rows.tangent is None else rows.tangent
    dz, du = torch.empty_like(rows.features), torch.empty_like(u)
    to = GradientBuffers(dz[: rows.plain], dz[rows.plain :], du)
    return sweep(rows, options, options.coefficients.times(rows.weight), to), (dz, du)


def _no_target_is(value: int, target: Tensor) -> bool:
    """Return whether no target has this value; False if this is not known, as on a GPU."""
    if type(target) is not Tensor or target.device.type != "cpu" or not 0 < len(target) <= _FEW:
        return False
    values = target.numpy()  # host memory: no operation of torch
    return bool(values.min() > value) or not (values == value).any()


def cross_entropy_and_gradients(
    logits: Tensor, u: Tensor, target: Tensor, options: SoftmaxOptions
) -> tuple[Tensor, Means, tuple[Tensor, Tensor]]:
    """Return the total c₀·ℓ + c₁·uᵀHu + c₂·∂ℓ/∂ε, its three means, and its gradients in logits and u.

    The means are over the targets (...) that are not ignored (0 if all are). The logits are
    (..., classes), and u is the tangent of all rows or only of the last ones; it is 0 for the others.
    No result has a graph.
    """
    c, dtype, classes = options.coefficients, working_dtype(logits.dtype), logits.shape[-1]
    assert c is not None
    z, tangent = logits.to(dtype), u.to(dtype)
    if logits.dim() != 2:
        z, tangent = (x.reshape(-1, classes) for x in (z, tangent))
        target = target.reshape(-1)
    few = z.numel() <= _FEW and options.form == "hessian" and not options.smoothing
    few = few and not any(isinstance(each, Tensor) for each in c)
    means: Means
    if few and _no_target_is(options.ignore_index, target):
        means, (dz, du) = _few_logits(z, tangent, target, c)
    else:
        weighted = row_weights(target, options.ignore_index, dtype)
        means, (dz, du) = sweep_with_gradients(OutputRows(z, tangent, *weighted), options)
    return c.total(means), means, (dz.view(logits.shape), du.view(u.shape))
