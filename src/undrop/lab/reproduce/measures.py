"""Measures: perplexities, times and probed values that are read from records."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from undrop.lab.reproduce.records import Record
from undrop.registry import Registry

__all__ = ["MEASURES", "QUALITY", "REFERENCE", "Measure"]

REFERENCE = "drop-1"
"""The method that times and qualities are compared with, on the same setting and seed."""

QUALITY = 1.01
"""As good as the reference: within 1 % of its best validation perplexity."""


@dataclass(frozen=True)
class Measure:
    """A positive number of a record, given the reference's record with the same seed.

    One that does not compare takes any record as the reference.
    """

    label: str
    digits: int
    of: Callable[[Record, Record], float]
    compares: bool = False


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
