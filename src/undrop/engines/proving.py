"""Prove that a model computes the same on a stacked batch as on a plain one.

A candidate is a choice of the batch dimension, of where to stack (at the first site or at the input),
and of the order of flattened dimensions. It is right if its stacked pass agrees with plain passes, row
by row: a row without noise with the plain output, and a row at ±ε₀ with a plain pass over the same
examples with the same noise. If no candidate agrees, the examples interact, and the search raises
``NotStackable``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from undrop.engines.base import Request
from undrop.engines.layout import Rows
from undrop.engines.plan import NotStackable, Plan, SitePlan, map_dims
from undrop.engines.proof_passes import (
    CandidateFailed,
    CandidatePass,
    Reference,
    batch_dims,
    buffers_of,
    changed,
    close,
    equal,
    grown_dim,
)
from undrop.errors import EngineError, UndropError
from undrop.intercept import Interception, Site, call, keep_buffers, logits_of, no_noise, tensors_in
from undrop.rng_snapshot import RngSnapshot

_log = logging.getLogger("undrop")

NO_DROPOUT = "it has no active dropout"
_ORDER_SEED = 2  # for the order of the examples in a proof


class Prover:
    """Runs the passes that a proof compares, all from the same state of every generator and buffer.

    The passes run without autocast: whether examples interact does not depend on the precision, and in
    float32 it is easier to see.

    Args:
        request: the request of the step.
        restore_rng: whether every pass starts from the same random state. It may be False for a model
            that is known to draw no random numbers. If such a model does draw, the passes differ and the
            proof fails.
    """

    def __init__(self, request: Request, *, restore_rng: bool = True) -> None:
        self.request, self.batch = request, request.batch
        self._rng = RngSnapshot(self.batch.model) if restore_rng else None
        self.sites: list[Site] = []
        """The sites of the plain pass."""
        self.output: Any = None
        """The output of the plain pass."""
        self.buffers_before: dict[str, Tensor] = {}
        """The model's buffers before a pass."""
        self.plain_buffers: dict[str, Tensor] = {}
        """The model's buffers after the plain pass."""
        self.stacked_buffers: dict[str, Tensor] = {}
        """The model's buffers after a stacked pass."""
        self.changed_buffers: tuple[str, ...] = ()
        """The names of the buffers that the plain pass changed."""
        self.draws_random_numbers = False
        """Whether the plain pass drew random numbers; its dropout is off."""
        self.mask_draws: tuple[bool | None, ...] = ()
        """What the plain pass found for ``Plan.mask_draws``."""
        self.reads_filled_tensor = False
        """What the plain pass found for ``Plan.reads_filled_tensor``."""
        self.no_effect = False
        """Whether noise had no effect on the output, so that the comparison proves nothing."""

    @contextmanager
    def from_same_state(self, mode: Interception) -> Iterator[None]:
        """Run a pass under ``mode`` from the state in which all passes start; restore the buffers."""
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
        replacements: dict[int, nn.Parameter] = {}
        for p in self.batch.model.parameters():
            if p.requires_grad and p.is_floating_point() and not p.any():
                fan_in = p.numel() // len(p) if p.dim() else 1
                values = torch.randn(p.shape, generator=generator) / max(fan_in, 1) ** 0.5
                replacements[id(p)] = nn.Parameter(values.to(p))
        zeros = [
            (module._parameters, name, p)
            for module in self.batch.model.modules()
            for name, p in module._parameters.items()
            if id(p) in replacements
        ]
        try:
            for parameters, name, zero in zeros:
                parameters[name] = replacements[id(zero)]
            yield
        finally:
            for parameters, name, zero in zeros:
                parameters[name] = zero

    def run_plain(self, times: int = 2) -> None:
        """Run the model without noise; raise an error for wrong targets, or if two outputs differ."""
        outputs = []
        self.buffers_before = buffers_of(self.batch.model)
        for _ in range(times):
            with self.from_same_state(mode := Interception(self.batch.model, no_noise)):
                outputs.append(self.batch.forward())
                self.plain_buffers = buffers_of(self.batch.model)
                changed_rng = self._rng is not None and self._rng.changed_generators()
                self.draws_random_numbers = bool(changed_rng)
            self.sites, self.mask_draws = mode.sites, tuple(mode.mask_draws.values())
            self.reads_filled_tensor = mode.reads_filled_tensor
        self.output = outputs[-1]
        loss = self.request.loss
        loss.check(loss.select(self.output), self.batch.targets)
        self.changed_buffers = changed(self.buffers_before, self.plain_buffers)
        pairs = zip(tensors_in(outputs[0]), tensors_in(self.output), strict=True)
        if not all(equal(a, b) or close(a, b) for a, b in pairs):
            raise EngineError(
                f"two passes of {type(self.batch.model).__name__} without noise differ, so it draws "
                "random numbers that undrop can't repeat, or keeps state from one call to the next: "
                "draw from torch's, NumPy's or Python's global generators, and keep state in buffers."
            )

    def adapted(self, last: Plan) -> Plan:
        """Return the last plan for the new shapes, without a proof."""
        rows = self._rows(last.dim)
        plan, _ = self._run(self._draft_like(last, rows), rows, None)
        return replace(plan, midpoints=last.midpoints)

    def proven_again(self, last: Plan) -> Plan | None:
        """Prove the last plan for this batch; return it, or None if it is wrong for this batch."""
        try:
            reference = Reference(self, self._rows(last.dim), last.dim)
            self.no_effect = reference.no_effect
            draft = self._draft_like(last, reference.rows)
            plan = self._proven(draft, reference, midpoints=last.midpoints)
        except Exception as error:  # a model may raise anything on a batch that it was not made for
            _log.debug("undrop rules out a plan: %r", error)
            return None
        return plan if plan.midpoints == last.midpoints else None

    def search(self, at_first_site_allowed: bool) -> Plan:
        """Return the first candidate that agrees with plain passes, or raise ``NotStackable``.

        A candidate in which examples share masks along the batch is used only if there is no other: its
        batch dimension is likely to be time.
        """
        if not self.sites:
            raise NotStackable(NO_DROPOUT)
        for site in self.sites:
            site.sigma  # noqa: B018, raises if p = 1
        reason, fallback = "its examples interact", None
        for dim in self._dims():
            try:
                reference = Reference(self, self._rows(dim), dim)
                self.no_effect = reference.no_effect
            except (
                Exception
            ) as error:  # a model may raise anything on a batch that it was not made for
                _log.debug("undrop rules out dimension %d: %r", dim, error)
                continue
            orders = (False, True) if reference.flattened else (False,)
            positions = (True, False) if at_first_site_allowed else (False,)
            for time_major, at_first_site in product(orders, positions):
                try:
                    plan = self._candidate(reference, dim, at_first_site, time_major)
                except NotStackable as error:
                    reason = str(error)
                except UndropError:
                    raise
                except Exception as error:
                    _log.debug("undrop rules out a candidate: %r", error)
                else:
                    if not _shares_masks(plan, reference.rows.layout.batch):
                        return plan
                    fallback = fallback or plan
        if fallback is None:
            raise NotStackable(reason)
        return fallback

    def _dims(self) -> Sequence[int]:
        """Return the dimensions that may be the batch, the most likely first."""
        if self.request.batch_dim is not None:
            return (self.request.batch_dim,)
        target = next(tensors_in(self.batch.targets), None)
        return range(min(target.dim(), 3) if target is not None else 1)

    def _rows(self, dim: int) -> Rows:
        try:
            layout = self.request.layout(dim)
        except (IndexError, StopIteration) as error:
            raise CandidateFailed from error
        if layout.noisy == layout.batch:
            return Rows(layout, None)
        generator = torch.Generator().manual_seed(_ORDER_SEED)
        order = torch.rand(layout.batch, generator=generator).argsort()  # it separates neighbors
        device = next((t.device for t in tensors_in(self.batch.inputs)), order.device)
        return Rows(layout, order.to(device))

    def _draft_like(self, last: Plan, rows: Rows) -> Plan:
        """Return a draft that stacks this batch as the last plan does."""
        time_major = [s.time_major for s in last.sites]
        if len(time_major) != len(self.sites):
            time_major = [False] * len(self.sites)
        return self._draft(rows, last.dim, last.at_first_site, time_major)

    def _draft(self, rows: Rows, dim: int, at_first_site: bool, time_major: list[bool]) -> Plan:
        """Return a plan to try, without the dimensions that its pass finds."""
        size = rows.layout.batch
        return Plan(
            dim=dim,
            at_first_site=at_first_site,
            input_dims=batch_dims(self.batch.inputs, dim, size),
            target_dims=batch_dims(self.batch.targets, dim, size),
            output_dims=(),
            logits_dim=0,
            sites=tuple(
                SitePlan(s, None, 1, order, torch.float32, torch.device("cpu"))
                for s, order in zip(self.sites, time_major, strict=True)
            ),
            midpoints=False,
            mask_draws=self.mask_draws,
            reads_filled_tensor=self.reads_filled_tensor,
        )

    def _candidate(
        self, reference: Reference, dim: int, at_first_site: bool, time_major: bool
    ) -> Plan:
        """Return a candidate of a search, proven for two orders of the examples.

        In a single order, examples that interact may happen to stay neighbors.
        """
        rows = reference.rows
        draft = self._draft(rows, dim, at_first_site, [time_major] * len(self.sites))
        if all(d is None for d in draft.input_dims):
            raise CandidateFailed
        plan = self._proven(draft, reference, midpoints=True)
        if rows.order is not None:
            other_order = Rows(rows.layout, rows.order.roll(1))
            self._proven(draft, Reference(self, other_order, dim), midpoints=False)
        return plan

    def _proven(self, draft: Plan, reference: Reference, *, midpoints: bool) -> Plan:
        """Complete a draft; raise ``CandidateFailed`` if its pass differs from plain passes.

        ``midpoints`` allows the plan to decide at midpoints, if that agrees too.
        """
        plan, output = self._run(draft, reference.rows, reference)
        reference.check(plan, output)
        if self.changed_buffers or changed(self.buffers_before, self.stacked_buffers):
            self._run(plan, reference.rows, reference, 1e-3)
            reference.check_buffers(self.stacked_buffers)
        midpoints = midpoints and self._midpoints_agree(plan, reference, output)
        return replace(plan, midpoints=midpoints)

    def _midpoints_agree(self, plan: Plan, reference: Reference, output: Any) -> bool:
        """Return whether a pass that decides at midpoints agrees with one that does not.

        At ε₀, a midpoint changes the output of a function with a kink by O(ε₀), and of a function that
        jumps (a mask of the largest entries) by more. Therefore the passes are also compared at a tiny
        ε₀, where jumps are rare but a wrong midpoint is still wrong.
        """

        def run(midpoints: bool, scale: float = 1.0) -> Any:
            variant = replace(plan, midpoints=midpoints)
            return self._run(variant, reference.rows, reference, scale)[1]

        def agree(output: Any, other: Any) -> bool:
            a, b = (logits_of(x).double() for x in (output, other))
            spread = (b - b.mean()).square().mean().sqrt()
            return bool((a - b).square().mean().sqrt() <= 2 * reference.epsilon * spread + 1e-6)

        try:
            return agree(run(True), output) or agree(run(True, 1e-3), run(False, 1e-3))
        except UndropError:
            raise
        except Exception:
            return False

    def _run(
        self, draft: Plan, rows: Rows, reference: Reference | None, scale: float = 1.0
    ) -> tuple[Plan, Any]:
        """Run a stacked pass and return the plan, with the dimensions that it found, and the output.

        The noise is that of the reference passes times ``scale``; without a reference there is none.
        """
        noise = None if reference is None else [scale * x for x in reference.noise]
        mode = CandidatePass(self.batch.model, draft, rows, noise)
        inputs = self.batch.inputs
        if not draft.at_first_site:
            inputs = map_dims(rows.stack, inputs, draft.input_dims)
        with self.from_same_state(mode):
            output = call(self.batch.model, inputs)
            self.stacked_buffers = buffers_of(self.batch.model)
        if mode.index != len(draft.sites) or not mode.stacked:
            raise CandidateFailed
        if draft.at_first_site and any(s.dim is None for s in mode.site_plans):
            raise CandidateFailed  # the model uses a tensor from before the first site after it
        dims = tuple(
            grown_dim(a.shape, b.shape, rows.layout)
            for a, b in zip(tensors_in(self.output), tensors_in(output), strict=True)
        )
        logits = grown_dim(logits_of(self.output).shape, logits_of(output).shape, rows.layout)
        if logits is None:
            raise CandidateFailed
        plan = replace(draft, output_dims=dims, logits_dim=logits, sites=tuple(mode.site_plans))
        return plan, output


def _shares_masks(plan: Plan, batch: int) -> bool:
    """Return whether a mask is the same along the batch dimension, as a locked mask is along time."""
    return any(s.dim is not None and s.site.mask_shape[s.dim] == 1 < batch for s in plan.sites)
