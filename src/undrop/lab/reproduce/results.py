"""Results: the records of a plan by cell and seed, and what is measured on a record."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from undrop.lab.reproduce.plan import Plan
from undrop.lab.reproduce.records import Record, Records
from undrop.lab.reproduce.statistics import Interval, geometric
from undrop.registry import Registry

REFERENCE = "drop-1"
"""The method that times and qualities are compared with, on the same setting and seed."""

QUALITY = 1.01
"""A method is as good as the reference within this factor of its best validation perplexity."""


@dataclass(frozen=True)
class Measure:
    """A positive number of a record, such as its best perplexity."""

    label: str
    digits: int
    of: Callable[[Record, Record], float]  # of a record and the reference's with the same seed
    compares: bool = False  # whether it looks at the reference's record


MEASURES: Registry[str, Measure] = Registry("measure")
"""All measures by name."""


def _measure(
    name: str, label: str, digits: int, *, compares: bool = False
) -> Callable[[Callable[[Record, Record], float]], Measure]:
    return lambda of: MEASURES.register(name)(Measure(label, digits, of, compares))


@_measure("best_valid_ppl", "best validation perplexity", 2)
def _best_valid_ppl(record: Record, reference: Record) -> float:
    return record.best_valid_ppl


def _first_good(record: Record, reference: Record) -> int | None:
    """The index of the first epoch that is as good as the reference's best."""
    goal = QUALITY * reference.best_valid_ppl
    return next((i for i, ppl in enumerate(record.curve.valid_ppl) if ppl <= goal), None)


@_measure("epochs_to_quality", "epochs to Drop₁'s quality", 0, compares=True)
def _epochs_to_quality(record: Record, reference: Record) -> float:
    first = _first_good(record, reference)
    return math.inf if first is None else float(record.curve.epoch[first])


@_measure("seconds_per_step", "seconds per step", 4)
def _seconds_per_step(record: Record, reference: Record) -> float:
    return record.training_seconds[-1] / record.steps


@_measure("time_used", "seconds of training in Drop₁'s", 3, compares=True)
def _time_used(record: Record, reference: Record) -> float:
    return record.training_seconds[-1] / reference.training_seconds[-1]


@_measure("taylor_share", "share of R_drop in the quadratic term", 3)
def _taylor_share(record: Record, reference: Record) -> float:
    return record.probed["taylor_share"]


class Results:
    """The records of a plan's cells."""

    def __init__(self, plan: Plan, records: Records) -> None:
        self.plan = plan
        self.records = records
        self._found = {name: cell.found(records) for name, cell in plan.cells.items()}

    def of(self, setting: str, method: str) -> dict[int, Record]:
        """Return the records of a cell by seed."""
        return self._found.get(f"{setting}:{method}", {})

    def values(self, measure: str, cell: str) -> dict[int, float]:
        """Return a measure of a cell by seed; one that compares needs the reference's record."""
        records = self._found.get(cell, {})
        found = MEASURES[measure]
        if not found.compares:
            return {seed: found.of(record, record) for seed, record in records.items()}
        references = self._found.get(f"{cell.partition(':')[0]}:{REFERENCE}", {})
        return {
            seed: found.of(record, references[seed])
            for seed, record in records.items()
            if seed in references
        }

    def interval(self, measure: str, cell: str) -> Interval | None:
        """Return the mean of a measure over a cell's seeds; None if it has no record."""
        values = list(self.values(measure, cell).values())
        return geometric(values) if values else None
