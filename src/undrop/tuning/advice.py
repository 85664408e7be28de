"""Whether dropout will help, where, and which p to start from, before a long training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from undrop.errors import DataError
from undrop.objectives import Dropout, Objective
from undrop.options import check_int
from undrop.report import Table
from undrop.tuning.history import DECAY, History
from undrop.tuning.rule import START, log_odds, probability
from undrop.tuning.tuner import STEPS, Tuner

TRIALS = 20
"""How many trials a short training makes; the second half of them counts."""
LEAST = 4
"""The fewest trials to read an advice off."""
HELPS = 0.05
"""Dropout helps where every p of the second half lies above this, and does not where none does."""


@dataclass(frozen=True)
class SiteAdvice:
    """One site, or all of them: the p that a tuner ended up at."""

    name: str
    p: float
    """Where to start: the mean over the second half of the trials, on the scale of log σ²."""
    low: float
    """The lowest p in that half."""
    high: float
    """The highest p in that half."""

    @property
    def says(self) -> str:
        """Whether dropout helps."""
        if self.low > HELPS:
            return "helps"
        return "does not help" if self.high <= HELPS else "can't say"


@dataclass(frozen=True)
class Advice:
    """What a short training says."""

    every: SiteAdvice
    """All sites together: their mean on the scale of log σ²."""
    sites: tuple[SiteAdvice, ...]
    steps: int

    @property
    def verdict(self) -> str:
        """One sentence on all sites."""
        where = f"p = {self.every.p:.2f} ({self.every.low:.2f} to {self.every.high:.2f})"
        start = f"start at {where}"
        if self.every.says == "helps":
            return f"Dropout helps: {start}."
        if self.every.says == "does not help":
            return (
                f"Dropout does not help in the first {self.steps} steps, where {where} is best. This "
                f"says nothing about overfitting that comes later: if you expect it, start at {START:g}."
            )
        return (
            f"{self.steps} steps can't say whether dropout helps: {start}, and ask again with more "
            "steps, or let undrop.Tuner decide during the training."
        )

    def table(self) -> Table:
        """Return a row for all sites together and one for each."""
        rows = [
            (s.name, f"{s.p:.2f}", f"{s.low:.2f} to {s.high:.2f}", s.says)
            for s in (self.every, *self.sites)
        ]
        return Table(("site", "p", "range", "says"), rows, numbers={"p", "range"})

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for programs."""
        every, *sites = ({**asdict(s), "says": s.says} for s in (self.every, *self.sites))
        return {"verdict": self.verdict, "steps": self.steps, "every": every, "sites": sites}


def advise_from(history: History) -> Advice:
    """Read the advice off the second half of a tuner's trials.

    Raises:
        DataError: if there are fewer than four.
    """
    n = len(history.entries)
    if n < LEAST:
        raise DataError(
            f"there are only {n} trials, and advice takes {LEAST}: train for more steps."
        )
    late = history.entries[n // 2 :]
    names = [name for name in history.values if name != DECAY]
    paths = {name: [log_odds(entry.values[name]) for entry in late] for name in names}
    every = [fmean(values) for values in zip(*paths.values(), strict=True)]
    sites = tuple(_read(name, path) for name, path in paths.items())
    return Advice(_read("every site", every), sites, late[-1].step)


def _read(name: str, path: list[float]) -> SiteAdvice:
    low, p, high = (probability(f(path)) for f in (min, fmean, max))
    return SiteAdvice(name, min(max(p, low), high), low, high)  # a mean of equal values is rounded


def advise(
    model: nn.Module,
    batches: Iterable[Any],
    validation: Iterable[Any],
    *,
    steps: int = 200,
    objective: Objective | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
) -> Advice:
    """Train a copy of the model for a while and say whether dropout helps, where, and at which p.

    A :class:`~undrop.Tuner` makes 20 trials meanwhile, and the second half of them is the answer. It
    can't see overfitting that appears only in a longer training.

    Args:
        model: with dropout where you consider it; it is not changed.
        batches: training batches (inputs, targets), repeated as needed.
        validation: at least two batches that training does not see.
        steps: how long to train: a small share of the planned training.
        objective: the one to train with; by default dropout with the cross-entropy.
        optimizer: makes the optimizer from the parameters; by default AdamW with lr = 1e-3.
    """
    check_int("steps", steps, least=LEAST * STEPS)
    trained = copy.deepcopy(model).train()
    make = optimizer or partial(torch.optim.AdamW, lr=1e-3)
    stepper = make(trained.parameters())
    chosen = Dropout() if objective is None else objective
    tuner = Tuner(chosen, validation, interval=max(STEPS, steps // TRIALS))
    for inputs, targets in _repeated(batches, steps):
        step = tuner.step(trained, inputs, targets)
        stepper.zero_grad()
        step.backward()
        stepper.step()
    return advise_from(tuner.history)


def _repeated(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """The batches again and again, in their order."""
    found = list(batches)
    if not found:
        raise DataError("there are no training batches: pass at least one pair (inputs, targets).")
    for _, pair in zip(range(steps), cycle(found), strict=False):
        yield pair
