"""Find the plan of each model for stacked batches, and prove it again while the model trains.

The size of a dimension alone does not tell whether it is the batch, so ``proving.py`` tries candidates
and compares passes. A proof holds for the branch that the model took, for the shapes of the batch, and
for the weights at that time. So a plan is proven again

- for every new shape of the batch;
- for every new sequence of torch functions that the model calls, because it took another branch;
- at steps 16, 64 and 256, and every 1,024 steps: weights and buffers change, and examples that did not
  interact at first may do so later;
- at every step as long as noise has no effect on the output, because then every plan looks right.

The steps are counted in this process, and a proof changes no generator, buffer or gradient. So a resumed
run, which searches and proves again, computes the same bits if it finds the same plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from undrop.engines.base import Request
from undrop.engines.plan import NotStackable, Plan
from undrop.engines.proving import NO_DROPOUT, Prover
from undrop.intercept import Statistics, bare, is_sharded, preserve_model
from undrop.rng_snapshot import RngSnapshot

_FULL_PROOFS = 4  # the first shapes get a full search, with a check of the model's randomness
_EARLY, _EVERY = (16, 64, 256), 1024  # the steps of further proofs
_BRANCHES = 64  # a model with more branches gets a proof only if their number is a power of 2


@dataclass
class Proof:
    """A plan, and the behavior of the model that it is proven for."""

    plan: Plan | str
    """The plan, or why there is none."""
    trails: set[int] = field(default_factory=set)
    """The trails of the model's passes so far."""
    steps: int = 0
    no_effect: bool = False
    """Whether noise had no effect on the output."""


@dataclass
class Stacking:
    """What undrop knows about stacked passes of one model."""

    proofs: dict[tuple[Any, ...], Proof] = field(default_factory=dict)
    modes: tuple[bool, ...] = ()
    """Which modules were in train mode when a search failed."""
    proven: int = 0
    last: Plan | None = None
    late_allowed: bool = True
    """Whether stacking at the first site has never failed."""
    draws: bool = False
    """Whether the model draws random numbers that are not dropout."""
    changed_buffers: tuple[str, ...] = ()
    """The buffers that a pass changes, besides running statistics."""


_KNOWN: weakref.WeakKeyDictionary[nn.Module, Stacking] = weakref.WeakKeyDictionary()


def find_plan(request: Request, *, again: bool = False) -> tuple[Plan | None, str]:
    """Return the plan for a request, or None and the reason why there is none.

    With ``again``, forget the earlier plans, because the model behaves differently now. If two passes
    without noise differ, raise an ``EngineError``.
    """
    model = request.batch.model
    known = _KNOWN.setdefault(model, Stacking())
    if again:
        known.proofs.clear()
        known.late_allowed &= not (known.last is not None and known.last.late)
        known.proven, known.last = 0, None
    found = known.proofs.get(request.plan_key)
    if found is not None and isinstance(found.plan, str):
        # A module may have switched between train and eval mode since the search failed.
        found = None if found.plan == NO_DROPOUT or known.modes != _modes(model) else found
    if found is None:
        found = known.proofs[request.plan_key] = _search(request, known)
        if isinstance(found.plan, str):
            known.modes = _modes(model)
    return (None, found.plan) if isinstance(found.plan, str) else (found.plan, "")


def plan_holds(request: Request, trail: int, rng: RngSnapshot | None) -> bool:
    """Return whether the plan of a step is right for what the model did in that step.

    ``trail`` is the trail of the step, and ``rng`` the random state before it, for a model that draws
    random numbers. For any other model the proof leaves the random state alone: other threads may draw
    from the same generators.
    """
    model = request.batch.model
    proof = _KNOWN[model].proofs.get(request.plan_key)
    if proof is None or isinstance(proof.plan, str):
        return True  # another thread proves it again
    proof.steps += 1
    n, m = proof.steps, len(proof.trails)
    due = n in _EARLY or n % _EVERY == 0 or proof.no_effect
    branch = trail not in proof.trails and (m < _BRANCHES or m & (m - 1) == 0)
    proof.trails.add(trail)
    if n == 1 or not (due or branch) or is_sharded(model):
        return True
    with _preserved(request, draws=rng is not None) as inner:
        if rng is not None:
            rng.restore()
        prover = Prover(inner, draws=rng is not None)
        prover.run_plain(1)
        right = prover.proven_again(proof.plan) is not None
        proof.no_effect = prover.no_effect
    return right


class StateBeforeStep:
    """The state of a model before a step, so that the step can be repeated.

    It saves only what a pass is known to change: running statistics, buffers that changed in a proof
    (all buffers, if noise had no effect there), and the random state if the model draws random numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        known = _KNOWN.get(model, Stacking())
        no_effect = any(proof.no_effect for proof in known.proofs.values())
        inner = bare(model)
        changed = map(inner.get_buffer, known.changed_buffers)
        self._buffers = Statistics(model, inner.buffers() if no_effect else changed)
        self.rng = RngSnapshot(model) if known.draws else None

    def restore(self) -> None:
        """Restore the state."""
        self._buffers.restore()
        if self.rng is not None:
            self.rng.restore()


def _modes(model: nn.Module) -> tuple[bool, ...]:
    return tuple(module.training for module in model.modules())


@contextmanager
def _preserved(request: Request, *, draws: bool = True) -> Iterator[Request]:
    """Yield the request for the model that DDP wraps, and restore that model afterwards."""
    model = bare(request.batch.model)
    with preserve_model(model, draws=draws), torch.no_grad():
        yield replace(request, batch=request.batch._replace(model=model))


def _search(request: Request, known: Stacking) -> Proof:
    with _preserved(request) as inner:
        prover = Prover(inner)
        try:
            plan = _proven_plan(prover, known)
        except NotStackable as reason:
            return Proof(str(reason))
        finally:
            known.draws = known.draws or prover.random
            known.changed_buffers = prover.changed_buffers or known.changed_buffers
    known.proven, known.last = known.proven + 1, plan
    return Proof(plan, no_effect=prover.no_effect)


def _proven_plan(prover: Prover, known: Stacking) -> Plan:
    """Return the last plan if it is right for the new shapes, else the first candidate that is."""
    last = known.last
    if last is not None and is_sharded(prover.batch.model):
        prover.run_plain(1)
        return prover.adapted(last)  # every process must run the same number of passes
    if last is not None and known.proven >= _FULL_PROOFS:
        prover.run_plain(1)
        plan = prover.proven_again(last)
        if plan is not None:
            return plan
    with prover.without_zeros():
        prover.run_plain()
        plan = prover.search(last, known.late_allowed)
    if not prover.no_effect:
        return plan
    prover.run_plain()  # with the model's own weights: random ones may switch all units off
    return prover.search(plan, known.late_allowed)
