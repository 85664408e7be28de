"""What is read off a record: perplexities, times, and what was probed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from undrop.errors import UnknownNameError
from undrop.lab.reproduce.records import Record

__all__ = ["MEASURES", "QUALITY", "REFERENCE", "Measure", "measure_named"]

REFERENCE = "drop-1"
"""The method that times and qualities are measured against, on the same setting and seed."""

QUALITY = 1.01
"""As good as the reference: within 1 % of its best validation perplexity."""


def _best_valid_ppl(record: Record, reference: Record) -> float:
    return record.best_valid_ppl


def _best_in_time(record: Record, reference: Record) -> float:
    limit = reference.training_seconds[-1]
    times = zip(record.training_seconds, record.curve.valid_ppl, strict=True)
    return min(
        (ppl for seconds, ppl in times if seconds <= limit), default=record.curve.valid_ppl[0]
    )


def _first_good(record: Record, reference: Record) -> int | None:
    """The position of the first epoch that is as good as the reference ever is."""
    goal = QUALITY * reference.best_valid_ppl
    return next((i for i, ppl in enumerate(record.curve.valid_ppl) if ppl <= goal), None)


def _epochs_to_quality(record: Record, reference: Record) -> float:
    first = _first_good(record, reference)
    return math.inf if first is None else float(record.curve.epoch[first])


def _seconds_to_quality(record: Record, reference: Record) -> float:
    first = _first_good(record, reference)
    return math.inf if first is None else record.training_seconds[first]


def _seconds_per_step(record: Record, reference: Record) -> float:
    return record.training_seconds[-1] / record.steps


def _taylor_share(record: Record, reference: Record) -> float:
    return record.probed["taylor_share"]


@dataclass(frozen=True)
class Measure:
    """A positive number of a record, given the reference's record with the same seed."""

    label: str
    digits: int
    of: Callable[[Record, Record], float]


MEASURES: Mapping[str, Measure] = {
    "best_valid_ppl": Measure("best validation perplexity", 2, _best_valid_ppl),
    "best_in_time": Measure("best validation perplexity in Drop₁'s time", 2, _best_in_time),
    "epochs_to_quality": Measure("epochs to Drop₁'s quality", 0, _epochs_to_quality),
    "seconds_to_quality": Measure("seconds to Drop₁'s quality", 0, _seconds_to_quality),
    "seconds_per_step": Measure("seconds per step", 4, _seconds_per_step),
    "taylor_share": Measure("share of R_drop in the quadratic term", 3, _taylor_share),
}
"""All measures by name."""


def measure_named(name: str) -> Measure:
    """The measure of that name."""
    if name not in MEASURES:
        raise UnknownNameError("measure", name, MEASURES)
    return MEASURES[name]
