"""The passes that a proof compares: two plain passes with noise, and one over the stacked batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from undrop.engines.blocks import BlockTensor
from undrop.engines.layout import Layout, Rows
from undrop.engines.plan import NotStackable, Plan, PlanChanged, SitePlan, map_dims
from undrop.engines.stacked import StackedPass
from undrop.intercept import Interception, Site, call, tensors_in
from undrop.noise import draw_noise

if TYPE_CHECKING:
    from undrop.engines.proving import Prover

_EPSILON = 0.05
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_HALF_TOLERANCE = 5e-2


class CandidateFailed(Exception):
    """A candidate plan is wrong for the model."""


class CandidatePass(StackedPass):
    """A stacked pass that finds the batch dimension of each site while it runs, in ``site_plans``."""

    def __init__(
        self, model: nn.Module, draft: Plan, rows: Rows, noise: list[Tensor] | None
    ) -> None:
        super().__init__(model, draft, rows, noise or ())
        self.site_plans: list[SitePlan] = []

    def noisy(self, h: Tensor, p: float, **_: Any) -> Tensor:
        """Find the batch dimension of h, and apply the noise of the reference passes."""
        if self.index >= len(self.plan.sites):
            raise PlanChanged
        s = self.plan.sites[self.index]
        layout, shape = self.rows.layout, s.site.shape
        if not self.stacked:
            dim = dim_of(h.shape, self.plan.dim, layout.batch)
            if tuple(h.shape) != shape or dim is None:
                raise CandidateFailed
            h = self.rows.stack(h, dim)
            self.stacked = True
        dim = grown_dim(shape, h.shape, layout, flattened=True)
        repeats = 1 if dim is None else shape[dim] // layout.batch
        s = replace(s, dim=dim, repeats=repeats, dtype=h.dtype, device=h.device)
        self.site_plans.append(s)
        self.index += 1
        if not self.noise:
            return h
        noise = self.noise[self.index - 1].to(h)
        if dim is None:
            return BlockTensor.noisy(h, noise, layout)
        return h * _stacked_factors(noise, s, layout)


def _stacked_factors(noise: Tensor, s: SitePlan, layout: Layout) -> Tensor:
    """Return [1; 1 + noise; 1 - noise] for noise in the shape of η with r examples."""
    assert s.dim is not None
    if noise.shape[s.dim] == 1 < layout.noisy:  # the mask is shared by all examples
        noise = noise.expand(*noise.shape[: s.dim], layout.noisy, *noise.shape[s.dim + 1 :])
    rows = noise.movedim(s.dim, 0)
    if s.repeats > 1:
        sizes = (s.repeats, layout.noisy) if s.time_major else (layout.noisy, s.repeats)
        rows = rows.unflatten(0, sizes)
        rows = rows.transpose(0, 1) if s.time_major else rows
    ones = rows.new_ones(()).expand(layout.plain, *rows.shape[1:])
    stacked = torch.cat((ones, 1 + rows, 1 - rows))
    return s.reshape_rows(stacked.flatten(1), tuple(stacked.shape[1:]))


class Reference:
    """Two plain passes over the examples with noise, at +ε₀ and -ε₀ with the same η."""

    def __init__(self, prover: Prover, rows: Rows, dim: int) -> None:
        self.prover, self.rows = prover, rows
        self.noise: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(0)
        self.epsilon = _EPSILON / max(1.0, *(s.sigma for s in prover.sites))
        batch, size, inputs = prover.batch, rows.layout.batch, prover.batch.inputs
        if rows.order is not None:
            inputs = map_dims(rows.noisy, inputs, batch_dims(inputs, dim, size))
        self.outputs = []
        for sign in (1.0, -1.0):
            self._sign, self._index = sign, 0
            with prover.from_same_state(Interception(batch.model, self)):
                self.outputs.append(call(batch.model, inputs))
        self.flattened = any(n % size == 0 and n > size for s in prover.sites for n in s.shape)
        """Whether some site may have a dimension that is the batch flattened with another dimension."""

    @property
    def no_effect(self) -> bool:
        """Whether the noise has no effect on the output, so every candidate agrees with these passes."""
        pairs = zip(*map(tensors_in, self.outputs), strict=True)
        return all(close(a, b, 100 * _rounding(a.dtype)) for a, b in pairs)

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """Return h ⊙ (1 ± ε₀·σ·η) with the same η for both signs."""
        if self._index == len(self.noise):
            like = torch.empty((), dtype=torch.promote_types(h.dtype, torch.float32))
            eta = draw_noise("sign", site.mask_shape, site.p, like=like, generator=self.generator)
            self.noise.append(eta * (self.epsilon * site.sigma))
        noise = self.noise[self._index]
        self._index += 1
        if tuple(noise.shape) != site.mask_shape:
            raise CandidateFailed
        return torch.addcmul(h, h, noise.to(h), value=self._sign)

    def check(self, plan: Plan, output: Any) -> None:
        """Raise ``CandidateFailed`` if a stacked output differs from the plain ones beyond rounding."""
        rows, trees = self.rows, (output, self.prover.output, *self.outputs)
        leaves = zip(*(tensors_in(tree) for tree in trees), plan.output_dims, strict=True)
        for stacked, plain, up, down, dim in leaves:
            if dim is None:
                if not close(stacked, plain, 3 * self.epsilon):
                    raise NotStackable("an output without a batch depends on all examples")
                continue
            if not stacked.is_floating_point():
                continue
            before, plus, minus, _ = rows.layout.split(stacked, dim)
            without_noise = rows.noisy_last(plain, dim).narrow(dim, 0, rows.layout.plain)
            pairs = (*((x, without_noise) for x in before), (plus, up), (minus, down))
            # A float32 mask has fewer digits than a float64 output. Half precision would hide too much.
            rounds = up.dtype is torch.float64 and any(x.dtype is torch.float32 for x in plan.sites)
            dtype = torch.float32 if rounds else up.dtype
            tolerance = _TOLERANCE.get(dtype, _HALF_TOLERANCE)
            if not all(a.shape == b.shape and close(a, b, tolerance) for a, b in pairs):
                raise CandidateFailed
            scale = float(without_nan(up).abs().max()) if up.numel() else 0.0
            if not close(plus - minus, up - down, 2e-2, 100 * _rounding(dtype) * scale):
                raise CandidateFailed

    def check_buffers(self, after: dict[str, Tensor]) -> None:
        """Raise ``NotStackable`` if a stacked pass changes a buffer in another way than a plain pass.

        The stacked pass has tiny noise. Changes are compared, not values: one step changes a running
        count of examples by little.
        """
        for name, plain in self.prover.plain_buffers.items():
            before = self.prover.buffers_before.get(name, torch.zeros_like(plain))
            if name not in after or not _same_change(after[name], plain, before):
                raise NotStackable(f"its buffer {name!r} depends on all examples")


def _same_change(stacked: Tensor, plain: Tensor, before: Tensor) -> bool:
    if equal(stacked, plain):
        return True
    dense = plain.layout is torch.strided and plain.is_floating_point()
    if not dense or not stacked.shape == plain.shape == before.shape:
        return False
    rounding = 10 * _rounding(plain.dtype) * float(without_nan(before).abs().max())
    return close(stacked - before, plain - before, 1e-2, rounding + 1e-6)


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the buffers that a pass has changed."""
    return tuple(name for name, old in before.items() if not equal(after[name], old))


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers except those of normalization layers, which have their own rule."""
    norms = nn.modules.batchnorm._NormBase
    return {
        f"{path}.{name}".lstrip("."): buffer.clone()
        for path, module in model.named_modules()
        if not isinstance(module, norms)
        for name, buffer in module.named_buffers(recurse=False)
    }


def batch_dims(tree: Any, dim: int, size: int) -> tuple[int | None, ...]:
    """Return the batch dimension of each tensor: ``dim``, or the only one of that size."""
    return tuple(dim_of(x.shape, dim, size) for x in tensors_in(tree))


def dim_of(shape: torch.Size, dim: int, size: int) -> int | None:
    """Return ``dim`` if it has that size, else the only dimension that has; None if several have it."""
    if len(shape) > dim and shape[dim] == size:
        return dim
    dims = [d for d, n in enumerate(shape) if n == size]
    return dims[0] if len(dims) == 1 else None


def grown_dim(
    before: tuple[int, ...], after: torch.Size, layout: Layout, *, flattened: bool = False
) -> int | None:
    """Return the dimension that has the batch in ``before`` and the stacked batch in ``after``.

    It is None if the shapes are equal. If they differ in any other way, raise ``CandidateFailed``. With
    ``flattened``, the dimension may be the batch flattened with another dimension.
    """
    if len(before) != len(after):
        raise CandidateFailed
    grown = [d for d, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]
    if not grown:
        return None
    dim, *more = grown
    repeats = before[dim] // layout.batch
    fits = before[dim] == repeats * layout.batch and after[dim] == repeats * layout.total
    if more or not fits or (repeats != 1 and not flattened):
        raise CandidateFailed
    return dim


def without_nan(x: Tensor) -> Tensor:
    """Return x without a graph, with numbers in place of NaN and infinity."""
    return x.detach() if not x.is_floating_point() else torch.nan_to_num(x.detach())


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _stored(x: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that store a sparse tensor; for a dense tensor, the tensor itself."""
    if x.layout is torch.strided:
        return (x,)
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    return x.ccol_indices(), x.row_indices(), x.values()


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether a and b are equal bit for bit; sparse tensors must store the same values."""
    if a.layout is not b.layout or a.shape != b.shape:
        return False
    return all(map(torch.equal, _stored(a), _stored(b)))


def close(a: Tensor, b: Tensor, tolerance: float | None = None, floor: float = 0.0) -> bool:
    """Return whether a and b agree up to a tolerance relative to the largest entry of b, plus ``floor``.

    The default tolerance allows rounding only.
    """
    if a.layout is not b.layout or a.shape != b.shape:
        return False
    if a.layout is not torch.strided:
        pairs = zip(_stored(a), _stored(b), strict=True)
        return all(close(x, y, tolerance, floor) for x, y in pairs)
    if not a.is_floating_point():
        return bool((a == b).all())
    if not a.numel():
        return True
    tolerance = _TOLERANCE.get(a.dtype, _HALF_TOLERANCE) if tolerance is None else tolerance
    a, b = without_nan(a).double(), without_nan(b).double()
    limit = tolerance * b.abs().max()
    return bool((a - b).abs().max() <= limit + floor)
