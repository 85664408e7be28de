"""Whether dropout will help, where, and which p to start from, before a long training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from undrop.errors import DataError
from undrop.objectives import Dropout, Objective
from undrop.options import check_int
from undrop.report import Table
from undrop.tuning.history import CLEAR, DECAY, History, said
from undrop.tuning.rule import CENTRE, log_odds, probability, target
from undrop.tuning.tuner import Tuner

__all__ = ["Advice", "SiteAdvice", "advise", "advise_from"]

SIGNALS = 30
"""How often a short training measures; the second half of the measurements counts."""


@dataclass(frozen=True)
class SiteAdvice:
    """One site: the evidence, and p."""

    name: str
    z: float
    """The mean slope over its standard error: positive where dropout helps."""
    p: float
    """Where to start."""
    low: float
    """The p that two standard errors less evidence give."""
    high: float
    """The p that two standard errors more evidence give."""

    @property
    def says(self) -> str:
        """The evidence in words."""
        return said(self.z)


@dataclass(frozen=True)
class Advice:
    """What a short training says."""

    sites: tuple[SiteAdvice, ...]
    steps: int

    @property
    def verdict(self) -> str:
        """One sentence on all sites."""
        good = [f"`{s.name}` (start at p = {s.p:.2f})" for s in self.sites if s.z >= CLEAR]
        bad = [f"`{s.name}`" for s in self.sites if s.z <= -CLEAR]
        if good:
            rest = f"; it is in the way at {', '.join(bad)}" if bad else ""
            return f"Dropout helps at {', '.join(good)}{rest}."
        if len(bad) == len(self.sites):
            return "Dropout is in the way at every site: start without it, or with a small p."
        if bad:
            return f"Dropout is in the way at {', '.join(bad)}; no evidence at the other sites."
        return (
            f"No evidence either way in {self.steps} steps: start at p = {CENTRE:g}, and ask again with "
            "more steps, or let undrop.Tuner decide during the training."
        )

    def table(self) -> Table:
        """Return a row for each site."""
        rows = [
            (s.name, f"{s.z:+.1f}", f"{s.p:.2f}", f"{s.low:.2f} to {s.high:.2f}", s.says)
            for s in self.sites
        ]
        return Table(("site", "z", "p", "95 %", "says"), rows, numbers={"z", "p", "95 %"})

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for programs."""
        sites = [{**asdict(s), "says": s.says} for s in self.sites]
        return {"verdict": self.verdict, "steps": self.steps, "sites": sites}


def advise_from(history: History) -> Advice:
    """Read the advice off the second half of a tuner's measurements.

    Raises:
        DataError: if there are fewer than four.
    """
    sites = []
    for name in history.last():
        slopes = [entry.slope for entry in history.entries if entry.name == name]
        if name == DECAY:
            continue
        if len(slopes) < 4:
            raise DataError(
                f"there are only {len(slopes)} measurements of {name!r}: train for more steps."
            )
        sites.append(_site(name, slopes[len(slopes) // 2 :]))
    steps = max((entry.step for entry in history.entries), default=0)
    return Advice(tuple(sites), steps)


def _site(name: str, slopes: list[float]) -> SiteAdvice:
    values = torch.tensor(slopes, dtype=torch.float64)
    error = float(values.std()) / math.sqrt(len(slopes))
    z = float(values.mean()) / error if error > 0.0 else 0.0
    low, p, high = (probability(target(log_odds(CENTRE), z + d)) for d in (-CLEAR, 0.0, CLEAR))
    return SiteAdvice(name, z, p, low, high)


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

    The evidence is that of :class:`~undrop.Tuner`, which tunes p meanwhile, over the second half of
    this short training. It can't see overfitting that appears only in a longer training.

    Args:
        model: with dropout where you consider it; it is not changed.
        batches: training batches (inputs, targets), repeated as needed.
        validation: at least two batches that training does not see.
        steps: how long to train: a small share of the planned training.
        objective: the one to train with; by default dropout with the cross-entropy.
        optimizer: makes the optimizer from the parameters; by default AdamW with lr = 1e-3.
    """
    check_int("steps", steps, least=8)
    trained = copy.deepcopy(model).train()
    make = optimizer or partial(torch.optim.AdamW, lr=1e-3)
    stepper = make(trained.parameters())
    chosen = Dropout() if objective is None else objective
    tuner = Tuner(chosen, validation, interval=max(1, steps // SIGNALS))
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
