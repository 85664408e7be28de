"""The records of a worklist by cell and seed: measures, means with intervals, and verdicts on claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from undrop.lab.reproduce.records import Record, Records
from undrop.lab.reproduce.tables import Claim, Experiment, method, paper_number
from undrop.lab.reproduce.worklist import Worklist
from undrop.registry import Registry

LEVEL = 0.95
POWER = 0.8
"""The statistical power that :func:`seeds_needed` aims for."""
_MOST = 10_000  # seeds that :func:`seeds_needed` considers


@dataclass(frozen=True)
class Interval:
    """An estimate, its interval, the number of seeds, and the standard deviation over seeds.

    For a geometric mean, ``spread`` is the standard deviation of the logarithms.
    """

    estimate: float
    low: float
    high: float
    seeds: int
    spread: float = 0.0


def student_quantile(quantile: float, n: int) -> float:
    """Return a quantile of Student's t for the mean of n values."""
    from scipy import stats

    return float(stats.t.ppf(quantile, n - 1))


def geometric_mean(values: Sequence[float]) -> Interval:
    """Return the geometric mean of positive values, with Student's 95 % interval.

    Perplexities and times are compared by ratios, so their logarithms are averaged. The interval of one
    value is that value. With an infinite value (a quality that was never reached) the mean is infinite,
    and with a 0 (its reciprocal) it is 0; the interval then goes from the least value to the greatest.
    """
    if math.inf in values or 0.0 in values:
        mean = math.inf if 0.0 not in values else 0.0 if math.inf not in values else math.nan
        return Interval(mean, min(values), max(values), len(values), math.inf)
    interval = mean_interval([math.log(value) for value in values])
    mean, low, high = (math.exp(end) for end in (interval.estimate, interval.low, interval.high))
    return Interval(mean, low, high, interval.seeds, interval.spread)


def mean_interval(values: Sequence[float], *, comparisons: int = 1) -> Interval:
    """Return the mean with Student's interval.

    Args:
        values: one for each seed.
        comparisons: the number of intervals that must hold simultaneously with 95 % confidence
            (Bonferroni).
    """
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Interval(mean, mean, mean, n)
    spread = float(np.std(values, ddof=1))
    tail = (1.0 - LEVEL) / (2.0 * comparisons)
    half_width = student_quantile(1.0 - tail, n) * spread / math.sqrt(n) if spread else 0.0
    return Interval(mean, mean - half_width, mean + half_width, n, spread)


def seeds_needed(interval: Interval, above: float, below: float) -> int | None:
    """Return how many seeds decide whether a ratio lies in a range, with a probability of 80 %.

    It assumes that the measured ratio and spread are the true ones: the interval of that many seeds
    does not reach the nearest end of the range. None if the spread is unknown, or 10,000 seeds are not
    enough.
    """
    if interval.seeds < 2 or not 0.0 < interval.estimate < math.inf:
        return None
    at = math.log(interval.estimate)
    ends = [math.log(end) for end in (above, below) if 0.0 < end < math.inf]
    distance = min((abs(at - end) for end in ends), default=0.0)
    if distance == 0.0:
        return None
    tail = (1.0 - LEVEL) / 2.0
    for n in _counts():
        width = student_quantile(1.0 - tail, n) + student_quantile(POWER, n)
        if width * interval.spread / math.sqrt(n) <= distance:
            return n
    return None


def _counts() -> list[int]:
    """Every number from 2 to 100, then steps of 2 %."""
    counts = list(range(2, 101))
    while counts[-1] < _MOST:
        counts.append(math.ceil(counts[-1] * 1.02))
    return counts


def paired_ratio(
    over: Iterable[Mapping[int, float]], under: Iterable[Mapping[int, float]]
) -> Interval | None:
    """Return Π over / Π under, paired by seed; None if they share no seed."""
    over, under = list(over), list(under)  # both are read twice
    seeds = set.intersection(*(set(values) for values in [*over, *under]))
    if not seeds:
        return None
    ratios = [
        math.prod(values[seed] for values in over) / math.prod(values[seed] for values in under)
        for seed in sorted(seeds)
    ]
    return geometric_mean(ratios)


REFERENCE = "drop-1"
"""The method that times and qualities are compared with, on the same setting and seed."""

QUALITY = 1.01
"""A method is as good as the reference if its validation perplexity is at most this factor times the
reference's best."""


@dataclass(frozen=True)
class Measure:
    """A positive number that is computed from a record, such as its best perplexity."""

    label: str
    digits: int
    compute: Callable[[Record, Record], float]  # its arguments: a record, and the reference's
    needs_reference: bool = False  # whether it uses the reference's record, of the same seed


MEASURES: Registry[str, Measure] = Registry("measure")
"""All measures by name."""


def _epochs_to_quality(record: Record, reference: Record) -> float:
    """The first epoch that is as good as the reference's best."""
    goal = QUALITY * reference.best_valid_ppl
    epochs = zip(record.curve.epoch, record.curve.valid_ppl, strict=True)
    return next((float(epoch) for epoch, ppl in epochs if ppl <= goal), math.inf)


MEASURES.register("best_valid_ppl")(
    Measure("best validation perplexity", 2, lambda record, _: record.best_valid_ppl)
)
MEASURES.register("epochs_to_quality")(
    Measure("epochs to Drop₁'s quality", 0, _epochs_to_quality, needs_reference=True)
)
MEASURES.register("seconds_per_step")(
    Measure("seconds per step", 4, lambda record, _: record.training_seconds[-1] / record.steps)
)
MEASURES.register("time_used")(
    Measure(
        "training time relative to Drop₁'s",
        3,
        lambda record, plain: record.training_seconds[-1] / plain.training_seconds[-1],
        needs_reference=True,
    )
)
MEASURES.register("taylor_share")(
    Measure(
        "quadratic term as a share of R_drop", 3, lambda record, _: record.probed["taylor_share"]
    )
)


class Results:
    """The records of a worklist's cells."""

    def __init__(self, worklist: Worklist, records: Records) -> None:
        self.worklist = worklist
        self.records = records
        self._found = {name: cell.chosen_records(records) for name, cell in worklist.cells.items()}

    def records_of(self, cell: str) -> dict[int, Record]:
        """Return the records of a cell by seed."""
        return self._found.get(cell, {})

    def pairs(self, cell: str) -> dict[int, tuple[Record, Record]]:
        """Return each record of a cell with the reference's on the same setting and seed."""
        plain = self.records_of(f"{cell.partition(':')[0]}:{REFERENCE}")
        return {
            seed: (own, plain[seed]) for seed, own in self.records_of(cell).items() if seed in plain
        }

    def values(self, measure: str, cell: str) -> dict[int, float]:
        """Return a measure for each seed of a cell.

        If it is relative to the reference, seeds without a reference record are left out.
        """
        found = MEASURES[measure]
        alone = {seed: (record, record) for seed, record in self.records_of(cell).items()}
        records = self.pairs(cell) if found.needs_reference else alone
        return {seed: found.compute(*pair) for seed, pair in records.items()}

    def interval(self, measure: str, cell: str) -> Interval | None:
        """Return the mean of a measure over a cell's seeds; None if it has no record."""
        values = list(self.values(measure, cell).values())
        return geometric_mean(values) if values else None


HOLDS = "holds"
DOES_NOT_HOLD = "does not hold at this scale"
UNDECIDED = "undecided"
NOT_RUN = "not run"

_FEWEST = 2  # seeds that can decide a claim: one value has no spread


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim."""

    claim: str  # the sentence
    experiment: str  # the experiment that tests it
    verdict: str  # HOLDS, DOES_NOT_HOLD, UNDECIDED or NOT_RUN
    seeds: int
    estimate: float | None  # the ratio that the claim is about; None without runs
    low: float | None  # of its 95 % interval
    high: float | None
    paper: float | None  # the same ratio in the paper, if the paper has the numbers
    measured: str  # the ratio in words
    asked: str  # the interval that the claim needs
    reason: str  # a likely reason why the claim does not hold; empty if it does
    needed: int | None = None
    """How many seeds would decide an undecided claim with a probability of 80 %.

    None if it is decided, or the spread over seeds is unknown.
    """


def decide(claim: Claim, interval: Interval | None) -> str:
    """Decide a claim: it holds if the whole interval lies in its range, and fails if none of it does."""
    if interval is None:
        return NOT_RUN
    if interval.seeds < _FEWEST:
        return UNDECIDED
    if claim.above < interval.low and interval.high < claim.below:
        return HOLDS
    if interval.high <= claim.above or interval.low >= claim.below:
        return DOES_NOT_HOLD
    return UNDECIDED


def verdicts(experiment: Experiment, results: Results) -> list[Verdict]:
    """Return the verdicts on all claims of an experiment."""
    return [_verdict(experiment, claim, results) for claim in experiment.claims]


def _verdict(experiment: Experiment, claim: Claim, results: Results) -> Verdict:
    interval = paired_ratio(
        [results.values(claim.measure, cell) for cell in claim.over],
        [results.values(claim.measure, cell) for cell in claim.under],
    )
    verdict = decide(claim, interval)
    undecided = interval if verdict == UNDECIDED else None
    return Verdict(
        claim=claim.sentence,
        experiment=experiment.name,
        verdict=verdict,
        seeds=0 if interval is None else interval.seeds,
        estimate=None if interval is None else interval.estimate,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        paper=_paper_ratio(experiment, claim),
        measured=_measured(claim, experiment.settings),
        asked=_asked(claim),
        reason="" if verdict in (HOLDS, NOT_RUN) else claim.reasons.get(results.worklist.scale, ""),
        needed=None if undecided is None else seeds_needed(undecided, claim.above, claim.below),
    )


def _paper_ratio(experiment: Experiment, claim: Claim) -> float | None:
    """The claim's ratio of the paper's numbers; None if the paper lacks one of them."""
    numbers = {cell: paper_number(experiment.name, cell) for cell in (*claim.over, *claim.under)}
    known = {cell: n.value for cell, n in numbers.items() if n and n.measure == claim.measure}
    if len(known) < len(numbers):
        return None
    over, under = (math.prod(known[cell] for cell in side) for side in (claim.over, claim.under))
    return over / under


def _measured(claim: Claim, settings: Sequence[str]) -> str:
    """The ratio in words, with the settings if there are several."""

    def product(cells: Sequence[str]) -> str:
        pairs = [cell.split(":") for cell in cells]
        labels = [
            f"{method(name).label} on {setting}" if len(settings) > 1 else method(name).label
            for setting, name in pairs
        ]
        return " × ".join(labels)

    under = f" / {product(claim.under)}" if claim.under else ""
    return f"{MEASURES[claim.measure].label}: {product(claim.over)}{under}"


def _asked(claim: Claim) -> str:
    if claim.below == math.inf:
        return f"> {claim.above:.3g}"
    return f"{claim.above:.3g} – {claim.below:.3g}"
