"""Find out how a model runs on a stacked batch, and prove it before use.

Sizes alone never decide which dimension of which tensor holds the batch. Candidates are tried: the
dimension of the batch, stacking at the first site or at the input, the order of flattened
dimensions. A candidate is right if the stacked pass agrees row by row with plain passes: its rows
without noise with the plain output, its ± rows with two passes of the same examples alone, under the
same noise. If none agrees, the examples interact, and the reason is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from undrop.engines.blocks import BlockTensor
from undrop.engines.layout import Layout, Rows
from undrop.engines.stacked import (
    NotStackable,
    Plan,
    PlanChanged,
    SitePlan,
    StackedPass,
    map_dims,
)
from undrop.errors import EngineError, UndropError
from undrop.intercept import (
    Batch,
    Interception,
    Site,
    call,
    is_sharded,
    logits_of,
    no_noise,
    preserve_model,
    tensors_in,
)
from undrop.noise import draw as draw_noise
from undrop.rng_snapshot import RngSnapshot

__all__ = ["NO_DROPOUT", "Stacking", "find_plan", "layout_of"]

NO_DROPOUT = "it meets no dropout"
_EPSILON = 0.05
_PROOFS = 4  # shapes for which a plan is proven; from then on only the sites are looked up
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_HALF = 5e-2


@dataclass(frozen=True)
class Question:
    """What a plan depends on, beside the model."""

    fraction: float
    batch_dim: int | None
    exact_output: bool
    shapes: tuple[Any, ...]
    autocast: bool


@dataclass
class Stacking:
    """What is known about one model."""

    plans: dict[Question, Plan | str] = field(default_factory=dict)
    """A plan, or why there is none."""
    modes: tuple[bool, ...] = ()
    """Which modules were in train mode when a search failed."""
    proven: int = 0
    last: Plan | None = None
    late: bool = True
    """Whether stacking at the first site has never failed."""


_KNOWN: weakref.WeakKeyDictionary[nn.Module, Stacking] = weakref.WeakKeyDictionary()


def find_plan(
    batch: Batch,
    fraction: float,
    batch_dim: int | None,
    *,
    exact_output: bool = False,
    again: bool = False,
) -> tuple[Plan | None, str]:
    """Return the plan for a model and the shapes of a batch, or None and the reason.

    Args:
        batch: the model and the data.
        fraction: ρ.
        batch_dim: the dimension of the batch in the targets; None to find it.
        exact_output: whether noisy examples have a row without noise as well.
        again: forget what is known, because the model used other sites.

    Raises:
        EngineError: if two passes without noise differ.
    """
    known = _KNOWN.get(batch.model)
    if known is None:
        known = _KNOWN[batch.model] = Stacking()
    held = [*tensors_in(batch.inputs), *tensors_in(batch.targets)]
    shapes, device = tuple(t.shape for t in held), held[0].device.type if held else "cpu"
    question = Question(
        fraction, batch_dim, exact_output, shapes, torch.is_autocast_enabled(device)
    )
    if again:
        known.plans.clear()
        known.late = known.late and not (known.last is not None and known.last.late)
        known.proven, known.last = 0, None
    found = known.plans.get(question)
    if found == NO_DROPOUT or (isinstance(found, str) and known.modes != _modes(batch.model)):
        found = None  # another mode may make examples independent
    if found is None:
        found = known.plans[question] = _search(batch, question, known)
        if isinstance(found, str):
            known.modes = _modes(batch.model)
    return (None, found) if isinstance(found, str) else (found, "")


def _modes(model: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in model.modules())


def layout_of(
    batch: Batch, dim: int, fraction: float, exact_output: bool, shared: bool = False
) -> Layout:
    """Return the layout for the batch in dimension ``dim`` of the first target (or input)."""
    target = next(tensors_in(batch.targets), None)
    if target is None:
        target = next(tensors_in(batch.inputs))
    size = target.shape[dim]
    return Layout(size, max(1, round(fraction * size)), exact_output, shared)


def _search(batch: Batch, question: Question, known: Stacking) -> Plan | str:
    model = batch.model.module if isinstance(batch.model, DistributedDataParallel) else batch.model
    prover = _Prover(batch._replace(model=model), question)
    with preserve_model(model), torch.no_grad():
        try:
            prover.run_plain()
            trust = known.last is not None and (known.proven >= _PROOFS or is_sharded(model))
            plan = (
                prover.looked_up(known.last)
                if trust and known.last
                else prover.search(known.last, known.late)
            )
        except NotStackable as reason:
            return str(reason)
    known.proven, known.last = known.proven + 1, plan
    return plan


class _Failed(Exception):
    """A candidate that is wrong."""


class _Prover:
    """Runs the passes that a proof compares; all from the same state of every generator."""

    def __init__(self, batch: Batch, question: Question) -> None:
        self.batch, self.question = batch, question
        self.rng = RngSnapshot(batch.model)
        self.sites: list[Site] = []
        self.draws: tuple[bool, ...] = ()
        self.aliased = False
        self.output: Any = None

    def run_plain(self) -> None:
        """Run the model twice without noise.

        Raises:
            EngineError: if the two outputs differ.
        """
        outputs = []
        for _ in range(2):
            self.rng.restart()
            with Interception(self.batch.model, no_noise) as mode:
                outputs.append(self.batch.forward())
            self.sites, self.draws = mode.sites, tuple(mode.draws.values())
            self.aliased = mode.aliased
        self.output = outputs[1]
        for a, b in zip(*(map(_plain, tensors_in(out)) for out in outputs), strict=True):
            if not torch.equal(a, b) and not _close(a, b):
                raise EngineError(
                    f"two passes of {type(self.batch.model).__name__} without noise differ, so it "
                    "draws random numbers that undrop can't hold still: remove that randomness, or "
                    "draw it from torch's, NumPy's or Python's global generators."
                )

    def looked_up(self, last: Plan) -> Plan:
        """Return the last plan with the sites of the new shapes."""
        plan, _ = self._trial(self._candidate(last), self._rows(last.dim), None)
        return replace(plan, midpoints=last.midpoints)

    def search(self, last: Plan | None, late_allowed: bool) -> Plan:
        """Return the first candidate that agrees with plain passes.

        Raises:
            NotStackable: if none does.
        """
        if not self.sites:
            raise NotStackable(NO_DROPOUT)
        reason, second_best = "its examples interact", None
        for dim in self._dims(last):
            try:
                rows = self._rows(dim)
                reference = _Reference(self, rows, dim)
            except (_Failed, UndropError, *_RUNTIME):
                continue
            orders = (False, True) if reference.flattened else (False,)
            lates = self._lates(last) if late_allowed else (False,)
            for time_major, late in product(orders, lates):
                try:
                    plan = self._proven(dim, late, time_major, rows, reference)
                except NotStackable as named:
                    reason = str(named)
                except (_Failed, PlanChanged, *_RUNTIME):
                    continue
                else:
                    if not _shares_masks(plan, rows.layout.batch):
                        return plan
                    second_best = second_best or plan
        if second_best is None:
            raise NotStackable(reason)
        return second_best

    def _dims(self, last: Plan | None) -> Iterator[int]:
        if self.question.batch_dim is not None:
            yield self.question.batch_dim
            return
        target = next(tensors_in(self.batch.targets), None)
        dims = target.dim() if target is not None else 1
        first = [last.dim] if last is not None and last.dim < dims else []
        yield from dict.fromkeys([*first, *range(min(dims, 3))])

    def _lates(self, last: Plan | None) -> tuple[bool, ...]:
        return (False, True) if last is not None and not last.late else (True, False)

    def _rows(self, dim: int) -> Rows:
        q = self.question
        try:
            layout = layout_of(self.batch, dim, q.fraction, q.exact_output)
        except (IndexError, StopIteration) as error:
            raise _Failed from error
        if layout.noisy == layout.batch:
            return Rows(layout, None)
        # Noise on every other example or so: neighbours are among the others.
        order = torch.arange(layout.batch).flip(0)
        device = next((t.device for t in tensors_in(self.batch.inputs)), order.device)
        return Rows(layout, order.to(device))

    def input_dims(self, tree: Any, dim: int, size: int) -> tuple[int | None, ...]:
        """Return where each tensor has the batch: in ``dim``, or in the only dimension of its size."""
        return tuple(_dim_of(x.shape, dim, size) for x in tensors_in(tree))

    def _candidate(self, last: Plan) -> Plan:
        size = self._rows(last.dim).layout.batch
        return replace(
            last,
            input_dims=self.input_dims(self.batch.inputs, last.dim, size),
            target_dims=self.input_dims(self.batch.targets, last.dim, size),
            draws=self.draws,
            aliased=self.aliased,
        )

    def _proven(
        self, dim: int, late: bool, time_major: bool, rows: Rows, reference: _Reference
    ) -> Plan:
        size = rows.layout.batch
        inputs = self.input_dims(self.batch.inputs, dim, size)
        targets = self.input_dims(self.batch.targets, dim, size)
        if all(d is None for d in inputs):
            raise _Failed
        draft = Plan(
            dim=dim,
            late=late,
            input_dims=inputs,
            target_dims=targets,
            output_dims=(),
            logits_dim=0,
            sites=tuple(
                SitePlan(s, None, 1, time_major, torch.float32, torch.device("cpu"))
                for s in self.sites
            ),
            midpoints=False,
            draws=self.draws,
            aliased=self.aliased,
        )
        plan, output = self._trial(draft, rows, reference)
        reference.check(self, plan, rows, output)
        return replace(plan, midpoints=self._midpoints_fit(plan, rows, reference, output))

    def _midpoints_fit(self, plan: Plan, rows: Rows, reference: _Reference, output: Any) -> bool:
        """Return whether deciding at midpoints changes the output by no more than O(ε₀)."""
        try:
            _, other = self._trial(replace(plan, midpoints=True), rows, reference)
        except (PlanChanged, NotStackable, *_RUNTIME):
            return False
        a, b = (logits_of(x).double() for x in (other, output))
        spread = (b - b.mean()).square().mean().sqrt()
        return bool((a - b).square().mean().sqrt() <= 2 * reference.epsilon * spread + 1e-6)

    def _trial(self, draft: Plan, rows: Rows, reference: _Reference | None) -> tuple[Plan, Any]:
        """Run one stacked pass that looks up where each site has the batch."""
        self.rng.restart()
        mode = _Trial(self.batch.model, draft, rows, reference)
        inputs = self.batch.inputs
        if not draft.late:
            inputs = map_dims(rows.stacked, inputs, draft.input_dims)
        with mode:
            output = call(self.batch.model, inputs)
        if mode.index != len(draft.sites) or not mode.stacked:
            raise _Failed
        if draft.late and any(s.dim is None for s in mode.found):
            raise _Failed  # something computed before the first site is used after it
        dims = tuple(
            _grown(a.shape, b.shape, rows.layout)
            for a, b in zip(tensors_in(self.output), tensors_in(output), strict=True)
        )
        logits = _grown(logits_of(self.output).shape, logits_of(output).shape, rows.layout)
        if logits is None:
            raise _Failed
        plan = replace(draft, output_dims=dims, logits_dim=logits, sites=tuple(mode.found))
        return plan, output


def _shares_masks(plan: Plan, batch: int) -> bool:
    """Return whether examples share a mask along the batch, as steps of time share a locked one."""
    return any(s.dim is not None and s.site.mask_shape[s.dim] == 1 < batch for s in plan.sites)


_RUNTIME = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, KeyError)


class _Trial(StackedPass):
    """A stacked pass that finds each site's batch dimension while it runs."""

    def __init__(
        self, model: nn.Module, draft: Plan, rows: Rows, reference: _Reference | None
    ) -> None:
        super().__init__(model, draft, rows, ())
        self.reference = reference
        self.found: list[SitePlan] = []

    def noisy(self, h: Tensor, p: float, **_: Any) -> Tensor:
        """Find the batch in h, and apply the noise of the reference passes."""
        if self.index >= len(self.plan.sites):
            raise PlanChanged
        s = self.plan.sites[self.index]
        layout, shape = self.rows.layout, s.site.shape
        if not self.stacked:
            dim = _dim_of(h.shape, self.plan.dim, layout.batch)
            if tuple(h.shape) != shape or dim is None:
                raise _Failed
            h = self.rows.stacked(h, dim)
            self.stacked = True
        dim = _grown(shape, h.shape, layout, flattened=True)
        repeats = 1 if dim is None else shape[dim] // layout.batch
        s = replace(s, dim=dim, repeats=repeats, dtype=h.dtype, device=h.device)
        self.found.append(s)
        self.index += 1
        if self.reference is None:
            return h
        noise = self.reference.noise[self.index - 1].to(h)
        if dim is None:
            blocks = (h + h * noise, h - h * noise)
            return BlockTensor.of((h, *blocks) if layout.plain else blocks)
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
    rest = tuple(stacked.shape[1:])
    return s.placed(stacked.flatten(1), rest)


class _Reference:
    """Two plain passes of the noisy examples alone, at +ε₀ and -ε₀ with the same noise."""

    def __init__(self, prover: _Prover, rows: Rows, dim: int) -> None:
        batch, layout = prover.batch, rows.layout
        self.noise: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(0)
        self.flattened = False
        self.epsilon = _EPSILON / max(1.0, *(s.sigma for s in prover.sites))
        inputs = batch.inputs
        if rows.order is not None:
            dims = prover.input_dims(inputs, dim, layout.batch)
            inputs = map_dims(rows.noisy, inputs, dims)
        self.outputs = []
        for sign in (1.0, -1.0):
            prover.rng.restart()
            self._sign, self._index = sign, 0
            with Interception(batch.model, self):
                self.outputs.append(call(batch.model, inputs))
        self.flattened = any(
            n % layout.batch == 0 and n > layout.batch for s in prover.sites for n in s.shape
        )

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """Return h ⊙ (1 ± ε₀·σ·η) with the same η for both signs."""
        if self._index == len(self.noise):
            like = torch.empty((), dtype=torch.promote_types(h.dtype, torch.float32))
            eta = draw_noise("sign", site.mask_shape, site.p, like=like, generator=self.generator)
            self.noise.append(eta * (self.epsilon * site.sigma))
        noise = self.noise[self._index]
        self._index += 1
        if tuple(noise.shape) != site.mask_shape:
            raise _Failed
        return torch.addcmul(h, h, noise.to(h), value=self._sign)

    def check(self, prover: _Prover, plan: Plan, rows: Rows, output: Any) -> None:
        """Compare a stacked output with the plain ones.

        Raises:
            _Failed: if they differ by more than rounding.
        """
        trees = (output, prover.output, *self.outputs)
        leaves = zip(*(tensors_in(tree) for tree in trees), plan.output_dims, strict=True)
        for stacked, plain, up, down, dim in leaves:
            if dim is None or not stacked.is_floating_point():
                continue
            others, plus, minus, _ = rows.layout.split(stacked, dim)
            same = rows.ordered(plain, dim).narrow(dim, 0, rows.layout.plain)
            pairs = (*((x, same) for x in others), (plus, up), (minus, down))
            if not all(a.shape == b.shape and _close(a, b) for a, b in pairs):
                raise _Failed
            scale = float(_plain(up).abs().max()) if up.numel() else 0.0
            if not _close(plus - minus, up - down, 2e-2, 100 * _rounding(up.dtype) * scale):
                raise _Failed


def _dim_of(shape: torch.Size, dim: int, size: int) -> int | None:
    if len(shape) > dim and shape[dim] == size:
        return dim
    found = [d for d, n in enumerate(shape) if n == size]
    return found[0] if len(found) == 1 else None


def _grown(
    before: tuple[int, ...], after: torch.Size, layout: Layout, *, flattened: bool = False
) -> int | None:
    """Return the dimension that grew from B to B + r entries; None if none did.

    Raises:
        _Failed: if the shapes differ in another way.
    """
    if len(before) != len(after):
        raise _Failed
    changed = [d for d, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]
    if not changed:
        return None
    (dim, *more) = changed
    repeats = before[dim] // layout.batch
    fits = before[dim] == repeats * layout.batch and after[dim] == repeats * layout.total
    if more or not fits or (repeats != 1 and not flattened):
        raise _Failed
    return dim


def _plain(x: Tensor) -> Tensor:
    return x.detach() if not x.is_floating_point() else torch.nan_to_num(x.detach())


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _close(a: Tensor, b: Tensor, tolerance: float | None = None, floor: float = 0.0) -> bool:
    """Return whether a and b agree to rounding, relative to the largest entry of b."""
    if not a.is_floating_point():
        return bool((a == b).all())
    if not a.numel():
        return True
    tolerance = _TOLERANCE.get(a.dtype, _HALF) if tolerance is None else tolerance
    a, b = _plain(a).double(), _plain(b).double()
    limit = tolerance * b.abs().max()
    return bool((a - b).abs().max() <= limit + floor)
