"""Prove that a model computes the same on a stacked batch as on a plain one.

A candidate is a choice of the batch dimension, of where to stack (at the first site or at the input),
and of the order of flattened dimensions. It is right if the stacked pass agrees row by row with plain
passes. Rows without noise must equal the plain output. Rows at ±ε₀ must equal two plain passes over the
same examples with the same noise. If no candidate agrees, the examples interact, and the search raises
``NotStackable`` with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from undrop.engines.base import Request
from undrop.engines.layout import Rows
from undrop.engines.plan import NotStackable, Plan, PlanChanged, SitePlan, map_dims
from undrop.engines.proof_passes import (
    CandidatePass,
    Failed,
    Reference,
    batch_dims,
    buffers_of,
    changed,
    close,
    equal,
    grown_dim,
    without_nan,
)
from undrop.errors import EngineError, UndropError
from undrop.intercept import Interception, Site, call, keep_buffers, logits_of, no_noise, tensors_in
from undrop.rng_snapshot import RngSnapshot

NO_DROPOUT = "it has no active dropout"
_RUNTIME = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, KeyError)
_ORDER = 2  # the seed for the order of the examples in a proof


class Prover:
    """Runs the passes that a proof compares, all from the same state of every generator and buffer.

    They run without autocast: whether examples interact does not depend on the precision, and in
    float32 it is easier to see.

    Args:
        request: the request that the engine gets.
        draws: False for a model that is known to draw no random numbers: no generator is restored. If
            it does draw, the passes differ and the proof fails.
    """

    def __init__(self, request: Request, *, draws: bool = True) -> None:
        self.request, self.batch = request, request.batch
        self._rng = RngSnapshot(self.batch.model) if draws else None
        self.sites: list[Site] = []
        self.output: Any = None
        self.before: dict[str, Tensor] = {}
        """The model's buffers before a pass."""
        self.buffers: dict[str, Tensor] = {}
        """The model's buffers after a plain pass."""
        self.stacked_buffers: dict[str, Tensor] = {}
        """The model's buffers after a stacked pass."""
        self.changed_buffers: tuple[str, ...] = ()
        """The names of the buffers that the pass changed."""
        self.random = False
        """Whether the model draws random numbers that are not dropout."""
        self.mask_draws: tuple[bool | None, ...] = ()
        self.reads_filled_tensor = False
        self.no_effect = False
        """Whether noise had no effect on the output, so the comparison proves nothing."""

    @contextmanager
    def running(self, mode: Interception) -> Iterator[None]:
        """Run a pass from the state in which all passes start, and restore the buffers."""
        if self._rng is not None:
            self._rng.restore()
        device = next((t.device.type for t in tensors_in(self.batch.inputs)), "cpu")
        with keep_buffers(self.batch.model), torch.autocast(device, enabled=False), mode:
            yield

    @contextmanager
    def without_zeros(self) -> Iterator[None]:
        """Replace parameters that are all zero by random numbers.

        A gate that is 0 hides the branch behind it: the output can be right and the gradient wrong.
        """
        generator = torch.Generator().manual_seed(0)
        random: dict[int, nn.Parameter] = {}
        for p in self.batch.model.parameters():
            if p.requires_grad and p.is_floating_point() and not p.any():
                fan_in = p.numel() // len(p) if p.dim() else 1
                values = torch.randn(p.shape, generator=generator) / max(fan_in, 1) ** 0.5
                random[id(p)] = nn.Parameter(values.to(p))
        places = [
            (module._parameters, name, p)
            for module in self.batch.model.modules()
            for name, p in module._parameters.items()
            if id(p) in random
        ]
        try:
            for parameters, name, old in places:
                parameters[name] = random[id(old)]
            yield
        finally:
            for parameters, name, old in places:
                parameters[name] = old

    def run_plain(self, times: int = 2) -> None:
        """Run the model without noise; raise an ``EngineError`` if two outputs differ."""
        outputs = []
        self.before = buffers_of(self.batch.model)
        for _ in range(times):
            mode = Interception(self.batch.model, no_noise)
            with self.running(mode):
                outputs.append(self.batch.forward())
                self.buffers = buffers_of(self.batch.model)
                self.random = self._rng is not None and bool(self._rng.changed_generators())
            self.sites, self.mask_draws = mode.sites, tuple(mode.mask_draws.values())
            self.reads_filled_tensor = mode.reads_filled_tensor
        self.output = outputs[-1]
        self.changed_buffers = changed(self.before, self.buffers)
        for a, b in zip(
            *(map(without_nan, tensors_in(out)) for out in (outputs[0], outputs[-1])), strict=True
        ):
            if not equal(a, b) and not close(a, b):
                raise EngineError(
                    f"two passes of {type(self.batch.model).__name__} without noise differ, so it "
                    "draws random numbers that undrop can't repeat, or keeps state from one "
                    "call to the next: draw from torch's, NumPy's or Python's global generators, and "
                    "keep state in buffers."
                )

    def adapted(self, last: Plan) -> Plan:
        """Return the last plan for the new shapes, without a proof."""
        rows = self._rows(last.dim)
        draft = self._draft(rows, last.dim, last.late, [s.time_major for s in last.sites])
        plan, _ = self._run(draft, rows, None)
        return replace(plan, midpoints=last.midpoints)

    def proven_again(self, last: Plan) -> Plan | None:
        """Return the last plan, proven for this batch; None if it is not right here."""
        try:
            rows = self._rows(last.dim)
            reference = Reference(self, rows, last.dim)
            self.no_effect = reference.no_effect
            draft = self._draft(rows, last.dim, last.late, [s.time_major for s in last.sites])
            plan = self._proven(draft, reference, midpoints=last.midpoints)
        except (Failed, PlanChanged, NotStackable, UndropError, *_RUNTIME):
            return None
        return plan if plan.midpoints == last.midpoints else None

    def search(self, last: Plan | None, late_allowed: bool) -> Plan:
        """Return the first candidate that agrees with plain passes, or raise ``NotStackable``."""
        if not self.sites:
            raise NotStackable(NO_DROPOUT)
        for site in self.sites:
            site.sigma  # noqa: B018, raises if p = 1
        reason, second_best = "its examples interact", None
        for dim in self._dims(last):
            try:
                rows = self._rows(dim)
                reference = Reference(self, rows, dim)
                self.no_effect = reference.no_effect
            except (Failed, UndropError, *_RUNTIME):
                continue
            orders = (False, True) if reference.flattened else (False,)
            first_late = last is None or last.late
            lates = (first_late, not first_late) if late_allowed else (False,)
            for time_major, late in product(orders, lates):
                try:
                    plan = self._candidate(reference, dim, late, time_major)
                except NotStackable as error:
                    reason = str(error)
                except (Failed, PlanChanged, *_RUNTIME):
                    continue
                else:
                    if not _shares_masks(plan, rows.layout.batch):
                        return plan
                    second_best = second_best or plan
        if second_best is None:
            raise NotStackable(reason)
        return second_best

    def _dims(self, last: Plan | None) -> Iterator[int]:
        if self.request.batch_dim is not None:
            yield self.request.batch_dim
            return
        target = next(tensors_in(self.batch.targets), None)
        dims = target.dim() if target is not None else 1
        first = [last.dim] if last is not None and last.dim < dims else []
        yield from dict.fromkeys([*first, *range(min(dims, 3))])

    def _rows(self, dim: int) -> Rows:
        try:
            layout = self.request.layout(dim)
        except (IndexError, StopIteration) as error:
            raise Failed from error
        if layout.noisy == layout.batch:
            return Rows(layout, None)
        # An order in which no pair or group of neighbors stays together.
        order = torch.rand(layout.batch, generator=torch.Generator().manual_seed(_ORDER)).argsort()
        device = next((t.device for t in tensors_in(self.batch.inputs)), order.device)
        return Rows(layout, order.to(device))

    def _draft(self, rows: Rows, dim: int, late: bool, time_major: list[bool]) -> Plan:
        """Return a plan to try; ``time_major`` is used only if it has an entry for each site."""
        size, count = rows.layout.batch, len(self.sites)
        majors = time_major if len(time_major) == count else [False] * count
        return Plan(
            dim=dim,
            late=late,
            input_dims=batch_dims(self.batch.inputs, dim, size),
            target_dims=batch_dims(self.batch.targets, dim, size),
            output_dims=(),
            logits_dim=0,
            sites=tuple(
                SitePlan(s, None, 1, major, torch.float32, torch.device("cpu"))
                for s, major in zip(self.sites, majors, strict=True)
            ),
            midpoints=False,
            mask_draws=self.mask_draws,
            reads_filled_tensor=self.reads_filled_tensor,
        )

    def _candidate(self, reference: Reference, dim: int, late: bool, time_major: bool) -> Plan:
        """Return a proven candidate of a search.

        It is also proven with the examples in another order: in one order, examples that interact may
        happen to stay neighbors.
        """
        rows = reference.rows
        draft = self._draft(rows, dim, late, [time_major] * len(self.sites))
        if all(d is None for d in draft.input_dims):
            raise Failed
        plan = self._proven(draft, reference, midpoints=True)
        if rows.order is not None:
            others = Rows(rows.layout, rows.order.roll(1))
            self._proven(draft, Reference(self, others, dim), midpoints=False)
        return plan

    def _proven(self, draft: Plan, reference: Reference, *, midpoints: bool) -> Plan:
        """Return the plan of a draft; raise ``Failed`` if its pass differs from plain passes."""
        plan, output = self._run(draft, reference.rows, reference)
        reference.check(plan, output)
        if self.changed_buffers or changed(self.before, self.stacked_buffers):
            self._run(plan, reference.rows, reference, 1e-3)
            reference.check_buffers(self.stacked_buffers)
        fit = midpoints and self._midpoints_fit(plan, reference, output)
        return replace(plan, midpoints=fit)

    def _midpoints_fit(self, plan: Plan, reference: Reference, output: Any) -> bool:
        """Return whether a pass that decides at midpoints agrees with one that does not.

        At ε₀, midpoints change the output by O(ε₀) if a function has kinks, and by more if it jumps (a
        mask of the largest entries). At a tiny ε₀ jumps are rare, but a wrong midpoint stays wrong.
        """

        def run(midpoints: bool, scale: float = 1.0) -> Any:
            variant = replace(plan, midpoints=midpoints)
            return self._run(variant, reference.rows, reference, scale)[1]

        def agree(one: Any, other: Any) -> bool:
            a, b = (logits_of(x).double() for x in (one, other))
            spread = (b - b.mean()).square().mean().sqrt()
            return bool((a - b).square().mean().sqrt() <= 2 * reference.epsilon * spread + 1e-6)

        try:
            return agree(run(True), output) or agree(run(True, 1e-3), run(False, 1e-3))
        except (PlanChanged, NotStackable, *_RUNTIME):
            return False

    def _run(
        self, draft: Plan, rows: Rows, reference: Reference | None, scale: float = 1.0
    ) -> tuple[Plan, Any]:
        """Run one stacked pass that finds the batch dimension of each site.

        Its noise is that of the reference passes times ``scale``; without a reference it has none.
        """
        noise = None if reference is None else [scale * each for each in reference.noise]
        mode = CandidatePass(self.batch.model, draft, rows, noise)
        inputs = self.batch.inputs
        if not draft.late:
            inputs = map_dims(rows.stacked, inputs, draft.input_dims)
        with self.running(mode):
            output = call(self.batch.model, inputs)
            self.stacked_buffers = buffers_of(self.batch.model)
        if mode.index != len(draft.sites) or not mode.stacked:
            raise Failed
        if draft.late and any(s.dim is None for s in mode.found):
            raise Failed  # something computed before the first site is used after it
        dims = tuple(
            grown_dim(a.shape, b.shape, rows.layout)
            for a, b in zip(tensors_in(self.output), tensors_in(output), strict=True)
        )
        logits = grown_dim(logits_of(self.output).shape, logits_of(output).shape, rows.layout)
        if logits is None:
            raise Failed
        plan = replace(draft, output_dims=dims, logits_dim=logits, sites=tuple(mode.found))
        return plan, output


def _shares_masks(plan: Plan, batch: int) -> bool:
    """Return whether examples share a mask along the batch, as time steps share a locked mask."""
    return any(s.dim is not None and s.site.mask_shape[s.dim] == 1 < batch for s in plan.sites)
