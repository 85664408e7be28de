"""Softmax cross-entropy along an output tangent, in closed form.

For a row of logits z, let p = softmax(z), let u = ∂z/∂ε be its tangent, and let t be the distribution
of its target (one-hot, or smoothed). With v = u - Σ_k p_k u_k,

    ℓ = -Σ t log p,    uᵀHu = Σ p v²,    ∂ℓ/∂ε = Σ p u - Σ t u,

and the gradients of the total c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε are

    d/dz = c₀(p - t) + c₁ p(v² - Σ p v²) + c₂ p v,    d/du = 2c₁ p v + c₂ (p - t).

A row has the weight 1/N if its target counts, and 0 if its target is ignored. Rows without a tangent
are *plain* rows. They come first, and only their loss is computed. No function reads a value from a
GPU, so a training step never waits for it.

Rows are processed in blocks that stay in the cache, because access to memory, above all to newly
allocated memory, takes most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 17  # in one buffer, so that all buffers of a block fit into a core's cache

Coefficient = float | Tensor  # a number, a 0-d tensor, or a column with one entry per row


class Derivatives(NamedTuple):
    """Derivatives of a loss along the output tangent u = ∂F/∂ε, for each row or as means over rows."""

    loss: Tensor  # ℓ(F)
    quadratic: Tensor  # uᵀHu, or the requested form
    directional: Tensor  # ∂ℓ/∂ε = Dℓ[F]·u


Means = Tensor | Derivatives  # the means of ℓ, uᵀHu and ∂ℓ/∂ε; a tensor of them has shape (3,)


class Coefficients(NamedTuple):
    """The total is ``loss·ℓ + quadratic·uᵀHu + directional·∂ℓ/∂ε``."""

    loss: Coefficient
    quadratic: Coefficient
    directional: Coefficient

    def times(self, weight: Tensor) -> Coefficients:
        """Return the coefficients of each row, as columns: c times the row's weight (rows,)."""
        return Coefficients(*(c * weight.unsqueeze(-1) for c in self))

    def select_rows(self, rows: slice) -> Coefficients:
        """Return the coefficients of some rows; a number is the coefficient of every row."""
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
    """The options of a softmax cross-entropy."""

    smoothing: float = 0.0  # label smoothing, as in torch
    form: str = "hessian"  # or "identity": ‖u‖² in place of uᵀHu
    coefficients: Coefficients | None = None  # of the total; None computes no gradient
    ignore_index: int = -100  # the target that marks an ignored row


class RowTerms(NamedTuple):
    """ℓ, uᵀHu and ∂ℓ/∂ε of each row, and Σ p u, the mean of u under p."""

    loss: Tensor
    quadratic: Tensor
    directional: Tensor
    mean_u: Tensor

    def sums(self, weight: Tensor) -> Tensor:
        """Return the sums over rows of weight (rows,) times ℓ, uᵀHu and ∂ℓ/∂ε, as a tensor (3,).

        A row of weight 0 contributes nothing, even if its logits are not finite.
        """
        terms = torch.stack((self.loss, self.quadratic, self.directional))
        return terms.masked_fill(weight == 0.0, 0.0).mul_(weight).sum(-1)

    @classmethod
    def concatenate(cls, blocks: Sequence[RowTerms]) -> RowTerms:
        """Return the terms of all rows from those of each block."""
        if len(blocks) == 1:
            return blocks[0]
        return RowTerms(*(torch.cat(x) for x in zip(*blocks, strict=True)))


class WorkBuffers(NamedTuple):
    """Buffers (rows, classes) for p, v and p v; ``tangent_gradients_`` reuses v and p v."""

    p: Tensor
    v: Tensor
    pv: Tensor


class GradientBuffers(NamedTuple):
    """Buffers for gradients; ``dz_tangent`` may share memory with u, and the other two with z."""

    dz_plain: Tensor  # d/dz of the rows without a tangent
    dz_tangent: Tensor  # d/dz of the rows with a tangent
    du: Tensor  # d/du


def row_blocks(rows: int, classes: int) -> list[slice]:
    """Cut rows into blocks whose buffers stay in the cache."""
    size = max(1, _BLOCK_ELEMENTS // max(classes, 1))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision, which is too coarse for sums; other types stay."""
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


def dot_target(x: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Return Σ_k t_k x_k of each row, where t = (1-α)·1_y + α/C is the distribution of the target."""
    x_y = x.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (1.0 - smoothing) * x_y + smoothing * x.mean(-1) if smoothing else x_y


def _subtract_target_(x: Tensor, target: Tensor, smoothing: float, scale: Coefficient) -> None:
    """Compute x -= scale·t in place."""
    if smoothing:
        x.sub_(scale * smoothing / x.shape[-1])
    value = x.new_ones(()) * scale * (smoothing - 1.0)
    x.scatter_add_(-1, target.unsqueeze(-1), value.expand(len(target), 1))


def plain_terms(
    z: Tensor, target: Tensor, smoothing: float, dz: Tensor, c: Coefficient | None
) -> RowTerms:
    """Return the terms of plain rows, and write d(c·ℓ)/dz = c(p - t) to dz, which may be z itself.

    If c is None, dz is only a buffer.
    """
    target_z = dot_target(z, target, smoothing)
    loss = _softmax(z, dz) - target_z  # ℓ = log Σ exp z - Σ t z
    if c is not None:
        _subtract_target_(dz.mul_(c), target, smoothing, c)
    zero = torch.zeros_like(loss)
    return RowTerms(loss, zero, zero, zero)


def tangent_terms(
    z: Tensor, u: Tensor, target: Tensor, options: SoftmaxOptions, work: WorkBuffers
) -> RowTerms:
    """Return the terms of each row of logits z along their tangent u, and fill the buffers.

    ``work.v`` may be u itself, and ``work.pv`` may be z itself.
    """
    target_z, target_u = (dot_target(x, target, options.smoothing) for x in (z, u))
    norm = torch.linalg.vecdot(u, u) if options.form == "identity" else None
    log_sum = _softmax(z, work.p)
    mean_u = torch.mul(work.p, u, out=work.pv).sum(-1)  # Σ p u
    v = torch.sub(u, mean_u.unsqueeze(-1), out=work.v)  # v = u - Σ p u
    pv = torch.mul(work.p, v, out=work.pv)
    quadratic = torch.linalg.vecdot(pv, v) if norm is None else norm  # uᵀHu = Σ p v²
    # ℓ = log Σ exp z - Σ t z,  ∂ℓ/∂ε = Σ p u - Σ t u
    return RowTerms(log_sum - target_z, quadratic, mean_u - target_u, mean_u)


def tangent_gradients_(
    work: WorkBuffers, terms: RowTerms, target: Tensor, options: SoftmaxOptions, c: Coefficients
) -> None:
    """Replace ``work.v`` by d/dz and ``work.pv`` by d/du of the total with the coefficients c."""
    p, v, pv = work
    c0, c1, c2 = (v.new_ones(()) * coefficient for coefficient in c)
    if options.form == "identity":
        # d/du = 2c₁u + c₂(p - t), with u = v + Σ p u;  d/dz = c₀(p - t) + c₂pv
        du = (v + terms.mean_u.unsqueeze(-1)).mul_(2.0 * c1).addcmul_(p, c2)
        torch.mul(pv, c2, out=v).addcmul_(p, c0)
        pv.copy_(du)
    else:
        # d/dz = pv(c₁v + c₂) + p(c₀ - c₁Σpv²) - c₀t;  d/du = 2c₁pv + c₂(p - t)
        v.mul_(c1).add_(c2).mul_(pv).addcmul_(p, c0 - c1 * terms.quadratic.unsqueeze(-1))
        pv.mul_(2.0 * c1).addcmul_(p, c2)
    _subtract_target_(v, target, options.smoothing, c0)
    _subtract_target_(pv, target, options.smoothing, c2)


class OutputRows(NamedTuple):
    """Rows of features with their targets; for a loss on logits, the features are the logits."""

    features: Tensor  # (rows, features)
    tangent: Tensor | None  # of all rows, or of the last ones; None if all rows are plain
    target: Tensor  # (rows,)
    weight: Tensor  # of each row in the mean: 1/N, or 0 for an ignored target

    @property
    def num_plain(self) -> int:
        """The number of plain rows, which come first."""
        return len(self.target) - (0 if self.tangent is None else len(self.tangent))

    def tangent_slice(self, rows: slice) -> slice:
        """Return the slice of the tangent that belongs to a slice of the rows."""
        return slice(max(rows.start - self.num_plain, 0), max(rows.stop - self.num_plain, 0))

    def select_rows(self, rows: slice) -> OutputRows:
        """Return some of the rows."""
        part, tangent = self.tangent_slice(rows), self.tangent
        tangent = tangent[part] if tangent is not None and part.start < part.stop else None
        return OutputRows(self.features[rows], tangent, self.target[rows], self.weight[rows])

    def cut(self, cut_rows: Callable[[int], list[slice]]) -> list[slice]:
        """Return slices of the plain rows, then of the others; ``cut_rows`` cuts a number of rows."""
        n = self.num_plain
        others = cut_rows(len(self.target) - n)
        return [*cut_rows(n), *(slice(n + s.start, n + s.stop) for s in others)]


def sweep(
    rows: OutputRows,
    options: SoftmaxOptions,
    c: Coefficients | None = None,
    gradients: GradientBuffers | None = None,
) -> Tensor:
    """Return the means of ℓ, uᵀHu and ∂ℓ/∂ε for logits z (the features) and their tangent u.

    With the coefficients c of each row, also write the gradients of the total in z and in u to
    ``gradients``.
    """
    z_all, u_all = rows.features, rows.tangent
    classes, num_plain = z_all.shape[-1], rows.num_plain
    terms, blocks = [], rows.cut(lambda n: row_blocks(n, classes))
    longest = max((block.stop - block.start for block in blocks), default=0)
    # If there are buffers for gradients, v and p v are computed in them.
    buffers = [z_all.new_empty((longest, classes)) for _ in range(3 if gradients is None else 1)]
    for block in blocks:
        p, *v_and_pv = (buffer[: block.stop - block.start] for buffer in buffers)
        z, target = z_all[block], rows.target[block]
        if u_all is None or block.start < num_plain:
            dz = p if gradients is None else gradients.dz_plain[block]
            c_loss = None if c is None else c.select_rows(block).loss
            terms.append(plain_terms(z, target, options.smoothing, dz, c_loss))
            continue
        tangent_block = rows.tangent_slice(block)
        if gradients is not None:
            v_and_pv = [gradients.dz_tangent[tangent_block], gradients.du[tangent_block]]
        work = WorkBuffers(p, *v_and_pv)
        terms.append(tangent_terms(z, u_all[tangent_block], target, options, work))
        if c is not None:
            tangent_gradients_(work, terms[-1], target, options, c.select_rows(block))
    return RowTerms.concatenate(terms).sums(rows.weight) if terms else z_all.new_zeros(3)


_FEW_LOGITS = 1 << 15  # up to this many, the number of calls dominates the cost


def _few_logits(
    z: Tensor, u: Tensor, target: Tensor, c: Any
) -> tuple[Derivatives, tuple[Tensor, Tensor]]:
    """Compute the same as ``sweep_with_gradients``, in as few calls as possible.

    This is for the Hessian without label smoothing. The coefficients c are numbers, u belongs to the
    last rows, and all N rows count, each with the weight w = 1/N.
    """
    n = len(z)
    w, num_plain = 1.0 / n, n - len(u)
    log_p = torch.log_softmax(z, -1)
    loss = torch.nn.functional.nll_loss(log_p, target)
    p = log_p.exp()
    dloss = p.scatter_add(-1, target.unsqueeze(-1), p.new_full((n, 1), -1.0)).mul_(w)  # w(p - t)
    p_u, dloss_u = (p[num_plain:], dloss[num_plain:]) if num_plain else (p, dloss)
    v = u - (p_u * u).sum(-1, keepdim=True)  # v = u - Σ p u
    w_pv = (p_u * v).mul_(w)
    w_pvv = w_pv * v
    quadratic = w_pvv.sum(-1, keepdim=True)  # w uᵀHu = w Σ p v²
    means = Derivatives(loss, quadratic.sum(), (dloss_u * u).sum())  # w ∂ℓ/∂ε = w Σ (p - t)u
    # d/du = w(2c₁pv + c₂(p - t))
    du = (w_pv * (2.0 * c.quadratic)).add_(dloss_u, alpha=c.directional)
    # d/dz = w(c₀(p - t) + c₁(pv² - p Σ p v²) + c₂pv)
    dz = dloss if c.loss == 1.0 else dloss.mul_(c.loss)
    dz_u = dz[num_plain:] if num_plain else dz
    dz_u.add_(w_pvv.addcmul_(p_u, quadratic, value=-1.0), alpha=c.quadratic)
    dz_u.add_(w_pv, alpha=c.directional)
    return means, (dz, du)


def sweep_with_gradients(
    rows: OutputRows, options: SoftmaxOptions
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the means of the three terms, and the gradients of the total in the logits and in u."""
    assert options.coefficients is not None
    u = rows.features[:0] if rows.tangent is None else rows.tangent
    dz, du = torch.empty_like(rows.features), torch.empty_like(u)
    gradients = GradientBuffers(dz[: rows.num_plain], dz[rows.num_plain :], du)
    means = sweep(rows, options, options.coefficients.times(rows.weight), gradients)
    return means, (dz, du)


def _none_ignored(target: Tensor, ignore_index: int) -> bool:
    """Return whether no target is ignored; False if there are none, or if they are on a device."""
    if type(target) is not Tensor or target.device.type != "cpu" or not len(target):
        return False
    values = target.numpy()  # in host memory: no operation of torch is called
    return bool(values.min() > ignore_index) or not (values == ignore_index).any()


def cross_entropy_and_gradients(
    logits: Tensor, u: Tensor, target: Tensor, options: SoftmaxOptions
) -> tuple[Tensor, Means, tuple[Tensor, Tensor]]:
    """Return the total c₀·ℓ + c₁·uᵀHu + c₂·∂ℓ/∂ε, its three means, and its gradients in logits and u.

    The means are over the targets (...) that are not ignored, and 0 if all are. The logits are
    (..., classes), and u is the tangent of all rows or of the last ones; for the others it is 0.
    No result has a graph.
    """
    c, dtype, classes = options.coefficients, working_dtype(logits.dtype), logits.shape[-1]
    assert c is not None
    z, tangent = logits.to(dtype), u.to(dtype)
    if logits.dim() != 2:
        z, tangent = (x.reshape(-1, classes) for x in (z, tangent))
        target = target.reshape(-1)
    few = z.numel() <= _FEW_LOGITS and options.form == "hessian" and not options.smoothing
    few = few and not any(isinstance(coefficient, Tensor) for coefficient in c)
    means: Means
    if few and _none_ignored(target, options.ignore_index):
        means, (dz, du) = _few_logits(z, tangent, target, c)
    else:
        rows = OutputRows(z, tangent, *row_weights(target, options.ignore_index, dtype))
        means, (dz, du) = sweep_with_gradients(rows, options)
    return c.total(means), means, (dz.view(logits.shape), du.view(u.shape))
