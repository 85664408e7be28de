"""Find the plan of each model for stacked batches, and prove it again while the model trains.

The size of a dimension alone does not tell whether it is the batch, so ``proving.py`` tries candidates
and compares passes. A proof holds for the branch that the model took, for the shapes of the batch, and
for the weights at that time. So a plan is proven again

- for every new shape of the batch;
- for every new sequence of torch functions that the model calls, because it took another branch;
- at steps 16, 64 and 256, and every 1,024 steps: weights and buffers change, and examples that did not
  interact at first may do so later;
- at every step while noise has no effect on the output, because then every plan looks right.

A proof changes no generator, buffer or gradient, and a search does not depend on earlier batches. So a
resumed run, which searches and proves again, finds the same plan and computes the same bits. The only
thing that it must remember is whether stacking at the first site has failed (``stacks_at_input``).
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

_CHECKS_OF_RANDOMNESS = 4  # the first searches check that two passes without noise agree
_EARLY, _EVERY = (16, 64, 256), 1024  # the steps of further proofs
_BRANCHES = 64  # above this number of branches, a new one is proven only if it is the 2ⁿ-th


@dataclass
class Proof:
    """A plan, and the trails of the model for which it is proven."""

    plan: Plan | None
    """The plan; None if the search found none."""
    reason: str = ""
    """The reason why there is no plan."""
    trails: set[int] = field(default_factory=set)
    """The trails of the model's passes so far."""
    steps: int = 0
    """The number of steps that used the plan, in this process."""
    no_effect: bool = False
    """Whether noise had no effect on the output."""


@dataclass
class Stacking:
    """The plans of one model, and what searches have learned about it."""

    proofs: dict[tuple[Any, ...], Proof] = field(default_factory=dict)
    """By ``Request.plan_key``."""
    modes: tuple[bool, ...] = ()
    """Which modules were in train mode when a search failed."""
    plans_found: int = 0
    """The number of plans that searches have found."""
    last: Plan | None = None
    """The plan that was found last."""
    at_first_site_allowed: bool = True
    """Whether stacking at the first site has never failed."""
    draws_random_numbers: bool = False
    """Whether the model draws random numbers that are not dropout."""
    changed_buffers: tuple[str, ...] = ()
    """The buffers that a pass changes, besides running statistics."""

    def forget_plans(self) -> None:
        """Forget all plans, because the model behaves differently now."""
        self.proofs.clear()
        self.at_first_site_allowed &= self.last is None or not self.last.at_first_site
        self.plans_found, self.last = 0, None


_STACKING: weakref.WeakKeyDictionary[nn.Module, Stacking] = weakref.WeakKeyDictionary()


def find_plan(request: Request, *, again: bool = False) -> tuple[Plan | None, str]:
    """Return the plan for a request, or None and the reason why there is none.

    With ``again``, forget all earlier plans of the model and search. If two passes without noise differ,
    raise an ``EngineError``.
    """
    model = request.batch.model
    stacking = _STACKING.setdefault(model, Stacking())
    if again:
        stacking.forget_plans()
    proof = stacking.proofs.get(request.plan_key)
    # A search that failed is repeated if a module has switched between train and eval mode since.
    if proof is not None and proof.plan is None:
        outdated = proof.reason == NO_DROPOUT or stacking.modes != _modes(model)
        proof = None if outdated else proof
    if proof is None:
        proof = stacking.proofs[request.plan_key] = _search(request, stacking)
        if proof.plan is None:
            stacking.modes = _modes(model)
    return proof.plan, proof.reason


def stacks_at_input(model: nn.Module) -> bool:
    """Return whether stacking a model at the first site has failed; then it is stacked at the input."""
    return not _STACKING.get(model, Stacking()).at_first_site_allowed


def stack_at_input(model: nn.Module) -> None:
    """Stack a model at the input from now on, as before it was saved."""
    _STACKING.setdefault(model, Stacking()).at_first_site_allowed = False


def plan_is_right(request: Request, trail: int, rng: RngSnapshot | None) -> bool:
    """Prove the plan of a step again if that is due; return False if the proof fails.

    Args:
        request: the request of the step.
        trail: the trail of the step.
        rng: the random state before the step if the model draws random numbers, else None. With None
            the proof leaves all generators alone, because other threads may draw from them.
    """
    model = request.batch.model
    proof = _STACKING[model].proofs.get(request.plan_key)
    if proof is None or proof.plan is None:
        return True  # another thread has started a new search
    proof.steps += 1
    n, branches = proof.steps, len(proof.trails)
    is_due = n in _EARLY or n % _EVERY == 0 or proof.no_effect
    is_new_branch = trail not in proof.trails
    if branches >= _BRANCHES and branches & (branches - 1):
        is_new_branch = False
    proof.trails.add(trail)
    if n == 1 or not (is_due or is_new_branch) or is_sharded(model):
        return True
    with _preserved(request, draws=rng is not None) as request_for_proof:
        if rng is not None:
            rng.restore()
        prover = Prover(request_for_proof, restore_rng=rng is not None)
        prover.run_plain(1)
        is_right = prover.proven_again(proof.plan) is not None
        proof.no_effect = prover.no_effect
    return is_right


class StateBeforeStep:
    """The state of a model before a step, so that the step can be repeated.

    It saves only what a pass is known to change: running statistics, buffers that changed in a proof
    (all buffers, if noise had no effect there), and the random state if the model draws random numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        stacking = _STACKING.get(model, Stacking())
        no_effect = any(proof.no_effect for proof in stacking.proofs.values())
        bare_model = bare(model)
        changed = map(bare_model.get_buffer, stacking.changed_buffers)
        self._buffers = Statistics(model, bare_model.buffers() if no_effect else changed)
        self.rng = RngSnapshot(model) if stacking.draws_random_numbers else None

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


def _search(request: Request, stacking: Stacking) -> Proof:
    with _preserved(request) as request_for_proof:
        prover = Prover(request_for_proof)
        try:
            plan = _proven_plan(prover, stacking)
        except NotStackable as reason:
            return Proof(None, str(reason))
        finally:
            stacking.draws_random_numbers |= prover.draws_random_numbers
            stacking.changed_buffers = prover.changed_buffers or stacking.changed_buffers
    stacking.plans_found, stacking.last = stacking.plans_found + 1, plan
    return Proof(plan, no_effect=prover.no_effect)


def _proven_plan(prover: Prover, stacking: Stacking) -> Plan:
    """Return the first candidate that is right.

    The search does not start from the last plan: a resumed run, which has none, must find the same one.
    """
    last = stacking.last
    if last is not None and is_sharded(prover.batch.model):
        prover.run_plain(1)
        return prover.adapted(last)  # every process must run the same number of passes
    passes = 2 if stacking.plans_found < _CHECKS_OF_RANDOMNESS else 1
    with prover.without_zeros():
        prover.run_plain(passes)
        plan = prover.search(stacking.at_first_site_allowed)
    if not prover.no_effect:
        return plan
    # The random weights may have switched all units off: search again with the model's own weights.
    prover.run_plain(passes)
    return prover.search(stacking.at_first_site_allowed)
