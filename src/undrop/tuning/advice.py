"""Whether dropout will help, where, and which p to start from, before a long training run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from undrop.diagnosis.measure.benefit import Benefit, BranchOptimizer, measure_benefit
from undrop.diagnosis.measure.branches import loss_without_noise
from undrop.diagnosis.measure.estimates import Estimate
from undrop.diagnosis.measure.model import MeasuredModel, collect
from undrop.diagnosis.measure.timing import Budget
from undrop.errors import DataError
from undrop.objectives import Dropout, Objective
from undrop.options import check_int
from undrop.report import Table, as_json
from undrop.tuning.rule import START
from undrop.tuning.trial import gap
from undrop.tuning.tuner import Tuner

BATCHES = 16
"""The largest number of training and validation batches for comparing losses."""
REPEATS = 2
"""The number of repeats of the short training runs with and without each site."""
BEST = (0.05, 0.2)
"""The range of the best of six p in 30 searches (docs/tuning.md)."""


@dataclass(frozen=True)
class Advice:
    """What a short training run says."""

    gap: Estimate
    """The validation loss minus the training loss, both without dropout."""
    benefit: Benefit
    """The result of 20 more steps with and without each dropout."""
    steps: int

    @property
    def evidence(self) -> str:
        """Whether dropout will help: it probably will if the short training run already overfits."""
        return "helps" if self.gap.low > 0.0 else "no evidence either way"

    @property
    def verdict(self) -> str:
        """One sentence on all sites."""
        after = f"after {self.steps} steps the validation loss is"
        start = f"start at p = {START:g} (in 30 searches the best was {BEST[0]:g} to {BEST[1]:g})"
        if self.evidence == "helps":
            helps = f"Dropout will probably help: {after} {self.gap} above the training loss."
            return f"{helps} {start.capitalize()}."
        return (
            f"No evidence either way: {after} not clearly above the training loss (by {self.gap}), so "
            f"there is no overfitting yet that dropout could prevent. If you expect it later, {start}."
        )

    def table(self) -> Table:
        """Return a row for each site, for all sites together and for weight decay."""
        found = self.benefit
        rows = [
            *found.sites.items(),
            ("every site", found.every_site),
            (f"weight decay (λ = {found.decay:.2g})", found.weight_decay),
        ]
        heads = ("site", "benefit", "z", "now")
        return Table(
            heads, [(name, *_shown(each)) for name, each in rows], numbers={"benefit", "z"}
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for programs."""
        return {
            "verdict": self.verdict,
            "evidence": self.evidence,
            "p": START,
            "steps": self.steps,
            "gap": as_json(self.gap),
            "benefit": as_json(self.benefit),
        }


def _shown(found: Estimate) -> tuple[str, str, str]:
    sign = "helps" if found.value > 0.0 else "harms"
    error = "?" if found.stderr is None else f"{found.stderr:.4f}"
    z = "–" if found.z is None else f"{found.z:+.1f}"
    return f"{found.value:+.4f} ± {error}", z, "no evidence" if found.includes_zero else sign


def advise_from(
    tuner: Tuner, model: nn.Module, batches: Sequence[Any], optimizer: Optimizer
) -> Advice:
    """Return the advice for a model after a short training run.

    Args:
        tuner: the tuner that set p.
        model: the model, in train mode.
        batches: the last training batches.
        optimizer: the optimizer that trained the model.
    """
    own, held = batches[-BATCHES:], tuner.validation.batches[:BATCHES]
    losses = partial(loss_without_noise, tuner.objective, model)
    found = gap([losses(*each) for each in held], [losses(*each) for each in own])
    pairs = collect(own, BATCHES)
    given = tuner.objective.loss
    measured = MeasuredModel(model, pairs, loss=given)
    update = BranchOptimizer(measured.model, optimizer, None, None)
    with measured.preserved():
        benefit = measure_benefit(
            *(measured, pairs, collect(held, BATCHES), Budget(math.inf), update),
            loss=given,
            repeats=REPEATS,
            probabilities=tuner.probabilities,
        )
    return Advice(found, benefit, tuner.steps)


def advise(
    model: nn.Module,
    batches: Iterable[Any],
    validation: Iterable[Any],
    *,
    steps: int = 200,
    objective: Objective | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
) -> Advice:
    """Train a copy of the model for a while, and say whether dropout will help, where, and at which p.

    The copy trains with p = 0.1 at every site. If its validation loss is then above its training loss,
    dropout will probably help; otherwise there is no evidence either way. Two repeats of 20
    more steps, with and without each site, then measure where it helps now: 40 · (sites + 3) steps.

    Args:
        model: a model with dropout wherever you consider it; it does not change.
        batches: training batches (inputs, targets), repeated as needed.
        validation: at least two batches that training does not see.
        steps: how long to train: a small share of the planned run.
        objective: the objective to train with; by default dropout with cross-entropy.
        optimizer: makes the optimizer from the parameters; by default AdamW with lr = 1e-3.
    """
    check_int("steps", steps)
    trained = copy.deepcopy(model).train()
    make = optimizer or partial(torch.optim.AdamW, lr=1e-3)
    stepper = make(trained.parameters())
    chosen = Dropout() if objective is None else objective
    tuner = Tuner(chosen, validation, interval=steps + 1)  # no trial
    seen: list[Any] = []
    for inputs, targets in _repeated(batches, steps):
        seen = [*seen[1 - BATCHES :], (inputs, targets)]
        step = tuner.step(trained, inputs, targets)
        stepper.zero_grad()
        step.backward()
        stepper.step()
    return advise_from(tuner, trained, seen, stepper)


def _repeated(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """Yield the batches in order, again and again."""
    found = list(batches)
    if not found:
        raise DataError("there are no training batches: pass at least one pair (inputs, targets).")
    for _, pair in zip(range(steps), cycle(found), strict=False):
        yield pair
