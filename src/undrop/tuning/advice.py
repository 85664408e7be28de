"""Advice before a long training run: will dropout help, at which sites, and which p to start from."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
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
from undrop.tuning.history import DECAY, EVERY_SITE, benefit_cells
from undrop.tuning.moves import START_P
from undrop.tuning.trial import loss_gap
from undrop.tuning.tuner import Tuner

BATCHES = 16
"""How many of the latest training batches, and of the validation batches, the loss gap uses."""
REPEATS = 2
"""The number of times that each short training run, with or without a site, is made."""
BEST_P = (0.05, 0.2)
"""In all 30 searches of docs/tuning.md, the best of six values of p lies in this range."""


@dataclass(frozen=True)
class Advice:
    """The result of a short training run: will dropout help a long run, and which sites help now."""

    gap: Estimate
    """The validation loss minus the training loss, both without dropout."""
    benefit: Benefit
    """The benefit of each dropout in 20 more steps."""
    steps: int
    """The steps of the short training run."""

    @property
    def evidence(self) -> str:
        """``"helps"`` if the model clearly overfits, else ``"no evidence either way"``.

        A model that overfits after a short training run probably needs dropout in a long one.
        """
        return "helps" if self.gap.low > 0.0 else "no evidence either way"

    @property
    def verdict(self) -> str:
        """The evidence and the p to start from, in one or two sentences."""
        low, high = BEST_P
        after = f"after {self.steps} steps the validation loss is"
        start = f"start at p = {START_P:g} (in 30 searches the best was {low:g} to {high:g})"
        if self.evidence == "helps":
            helps = f"Dropout will probably help: {after} {self.gap} above the training loss."
            return f"{helps} {start.capitalize()}."
        return (
            f"No evidence either way: {after} not clearly above the training loss (difference "
            f"{self.gap}), so there is no overfitting yet that dropout could prevent. If you expect it "
            f"later, {start}."
        )

    def table(self) -> Table:
        """Return a table of benefits: one row per site, one for all sites and one for weight decay."""
        benefits = {
            **self.benefit.sites,
            EVERY_SITE: self.benefit.every_site,
            f"{DECAY} (λ = {self.benefit.decay:.2g})": self.benefit.weight_decay,
        }
        rows = []
        for name, estimate in benefits.items():
            value, effect = benefit_cells(estimate, "helps", "harms")
            z = "–" if estimate.z is None else f"{estimate.z:+.1f}"
            rows.append((name, value, z, effect))
        return Table(("site", "benefit", "z", "effect now"), rows, numbers={"benefit", "z"})

    def to_json(self) -> dict[str, Any]:
        """Return the advice as a dictionary for JSON."""
        return {
            "verdict": self.verdict,
            "evidence": self.evidence,
            "p": START_P,
            "steps": self.steps,
            "gap": as_json(self.gap),
            "benefit": as_json(self.benefit),
        }


def advise_from(
    tuner: Tuner, model: nn.Module, batches: Sequence[Any], optimizer: Optimizer
) -> Advice:
    """Return the advice for a model that a tuner has trained for a short while.

    Args:
        tuner: the tuner of that training run; it holds the objective and the validation batches.
        model: the model, in train mode.
        batches: the last training batches.
        optimizer: the optimizer that trained the model.
    """
    training, validation = batches[-BATCHES:], tuner.validation.batches[:BATCHES]
    batch_loss = partial(loss_without_noise, tuner.objective, model)
    gap = loss_gap([batch_loss(*b) for b in validation], [batch_loss(*b) for b in training])
    training_pairs, validation_pairs = collect(training, BATCHES), collect(validation, BATCHES)
    loss, p = tuner.objective.loss, tuner.probabilities
    measured = MeasuredModel(model, training_pairs, loss=loss)
    update, budget = BranchOptimizer(measured.model, optimizer, None, None), Budget(math.inf)
    options: Any = {"loss": loss, "repeats": REPEATS, "probabilities": p}
    with measured.preserve():
        pairs = training_pairs, validation_pairs
        benefit = measure_benefit(measured, *pairs, budget, update, **options)
    return Advice(gap, benefit, tuner.steps)


def advise(
    model: nn.Module,
    batches: Iterable[Any],
    validation: Iterable[Any],
    *,
    steps: int = 200,
    objective: Objective | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
) -> Advice:
    """Train a copy for a while, and say whether dropout will help, where, and which p to start from.

    After a warm-up, the copy trains with p = 0.1 at every site whose p is not 0. If its validation loss
    is then clearly above its training loss, dropout will probably help; otherwise there is no evidence
    either way. Runs of 20 more steps measure which sites help now: one run with every dropout, one for
    each site without the dropout there, one without any dropout, and one with more weight decay. Each is
    made twice, with other batches. In all, this costs 40 · (sites + 3) steps.

    Args:
        model: a model with a dropout at every place that you consider; undrop trains only a copy.
        batches: training batches (inputs, targets), repeated as needed.
        validation: at least two batches that training does not see.
        steps: how many steps to train: a small share of the planned run.
        objective: the objective to train with; by default dropout with cross-entropy.
        optimizer: a function that returns an optimizer for the parameters; by default AdamW with
            lr = 1e-3.
    """
    check_int("steps", steps)
    trained = copy.deepcopy(model).train()
    make_optimizer = optimizer or partial(torch.optim.AdamW, lr=1e-3)
    copy_optimizer = make_optimizer(trained.parameters())
    tuner = Tuner(objective or Dropout(), validation, interval=steps + 1)  # so no trial happens
    pairs = list(batches)
    if not pairs:
        raise DataError("there are no training batches: pass at least one pair (inputs, targets).")
    recent: deque[Any] = deque(maxlen=BATCHES)
    for inputs, targets in islice(cycle(pairs), steps):
        recent.append((inputs, targets))
        step = tuner.step(trained, inputs, targets)
        copy_optimizer.zero_grad()
        step.backward()
        copy_optimizer.step()
    return advise_from(tuner, trained, list(recent), copy_optimizer)
