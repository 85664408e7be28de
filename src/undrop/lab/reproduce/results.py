"""The results of a worklist: measures of its records, means with intervals, and verdicts on claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from undrop.lab.reproduce.records import Record, Records
from undrop.lab.reproduce.tables import Claim, Experiment, method, paper_number
from undrop.lab.reproduce.worklist import Worklist
from undrop.registry import Registry

LEVEL = 0.95
"""The confidence level of intervals."""
POWER = 0.8
"""The statistical power that :func:`seeds_needed` aims for."""
_MAX_SEEDS = 10_000  # the largest number that :func:`seeds_needed` tries


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its interval."""

    estimate: float
    low: float
    high: float
    seeds: int
    spread: float = 0.0  # the standard deviation over seeds; of the logarithms for a geometric mean


def student_quantile(quantile: float, n: int) -> float:
    """Return a quantile of Student's t with n - 1 degrees of freedom, for the mean of n values."""
    from scipy import stats

    return float(stats.t.ppf(quantile, n - 1))


def geometric_mean(values: Sequence[float]) -> Interval:
    """Return the geometric mean of positive values, with Student's 95 % interval.

    Perplexities and times are compared by ratios, so their mean is geometric. The interval of one value
    is that value. A method that never reaches a quality takes infinitely many epochs, and the reciprocal
    is 0. If a value is infinite or 0, so is the mean, and the interval goes from the smallest value to
    the largest.
    """
    if math.inf in values or 0.0 in values:
        return Interval(math.prod(values), min(values), max(values), len(values), math.inf)
    logs = mean_interval([math.log(value) for value in values])
    mean, low, high = (math.exp(log) for log in (logs.estimate, logs.low, logs.high))
    return Interval(mean, low, high, logs.seeds, logs.spread)


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
    """Return the number of seeds that decides a claim with a probability of 80 %.

    If the measured ratio and spread are the true ones, the interval of that many seeds excludes the
    nearest end of the claim's range with this probability. The number is None if the spread is unknown,
    or if 10,000 seeds are not enough.
    """
    if interval.seeds < 2 or not 0.0 < interval.estimate < math.inf:
        return None
    log_ratio = math.log(interval.estimate)
    log_ends = [math.log(end) for end in (above, below) if 0.0 < end < math.inf]
    distance = min((abs(log_ratio - end) for end in log_ends), default=0.0)
    if distance == 0.0:
        return None
    tail = (1.0 - LEVEL) / 2.0
    n = 2
    while n <= _MAX_SEEDS:
        width = student_quantile(1.0 - tail, n) + student_quantile(POWER, n)
        if width * interval.spread / math.sqrt(n) <= distance:
            return n
        n = n + 1 if n < 100 else math.ceil(n * 1.02)  # large numbers in steps of 2 %
    return None


def paired_ratio(
    numerator: Sequence[Mapping[int, float]], denominator: Sequence[Mapping[int, float]]
) -> Interval | None:
    """Return Π numerator / Π denominator, paired by seed; None if no seed is in all of them."""
    seeds = set.intersection(*(set(values) for values in [*numerator, *denominator]))
    if not seeds:
        return None
    ratios = [
        math.prod(values[seed] for values in numerator)
        / math.prod(values[seed] for values in denominator)
        for seed in sorted(seeds)
    ]
    return geometric_mean(ratios)


REFERENCE = "drop-1"
"""The method that others are compared with, on the same setting and seed."""

QUALITY_FACTOR = 1.01
"""A method reaches the reference's quality when its validation perplexity is at most this factor times
the reference's best."""


@dataclass(frozen=True)
class Measure:
    """A positive number that is computed from a record, such as the best perplexity."""

    label: str
    digits: int
    compute: Callable[[Record, Record], float]  # of a record and the reference's with the same seed
    needs_reference: bool = False  # whether `compute` uses the reference's record


def _epochs_to_quality(record: Record, reference: Record) -> float:
    """Return the first epoch that reaches the reference's quality; infinity if none does."""
    goal = QUALITY_FACTOR * reference.best_valid_ppl
    epochs = zip(record.curve.epoch, record.curve.valid_ppl, strict=True)
    return next((float(epoch) for epoch, ppl in epochs if ppl <= goal), math.inf)


def _time_used(record: Record, reference: Record) -> float:
    return record.training_seconds[-1] / reference.training_seconds[-1]


MEASURES: Registry[str, Measure] = Registry("measure")
"""The measures by name."""

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
    Measure("training time relative to Drop₁'s", 3, _time_used, needs_reference=True)
)
MEASURES.register("taylor_share")(
    Measure(
        "quadratic term as a share of R_drop", 3, lambda record, _: record.probed["taylor_share"]
    )
)


class Results:
    """The records of a worklist's cells, and the measures of these records."""

    def __init__(self, worklist: Worklist, records: Records) -> None:
        self.worklist = worklist
        self.records = records
        self._by_cell = {name: cell.best_records(records) for name, cell in worklist.cells.items()}

    def records_of(self, cell: str) -> dict[int, Record]:
        """Return the records of a cell by seed; of a tuned method, those of the best variant."""
        return self._by_cell.get(cell, {})

    def pairs(self, cell: str) -> dict[int, tuple[Record, Record]]:
        """Return each record of a cell with the reference's record on the same setting and seed."""
        references = self.records_of(f"{cell.partition(':')[0]}:{REFERENCE}")
        return {
            seed: (record, references[seed])
            for seed, record in self.records_of(cell).items()
            if seed in references
        }

    def values(self, measure: str, cell: str) -> dict[int, float]:
        """Return the values of a measure for a cell, by seed.

        If the measure needs the reference, seeds without a record of the reference are left out.
        """
        compute = MEASURES[measure].compute
        if MEASURES[measure].needs_reference:
            return {seed: compute(*pair) for seed, pair in self.pairs(cell).items()}
        return {seed: compute(record, record) for seed, record in self.records_of(cell).items()}

    def interval(self, measure: str, cell: str) -> Interval | None:
        """Return the mean of a measure over the seeds of a cell; None if the cell has no record."""
        values = list(self.values(measure, cell).values())
        return geometric_mean(values) if values else None


HOLDS = "holds"
DOES_NOT_HOLD = "does not hold at this scale"
UNDECIDED = "undecided"
NOT_RUN = "not run"

_MIN_SEEDS = 2  # to decide a claim, because one value has no spread


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim. The names of the fields are the keys of ``claims.json``."""

    claim: str  # the sentence
    experiment: str  # the name of the claim's experiment
    verdict: str  # HOLDS, DOES_NOT_HOLD, UNDECIDED or NOT_RUN
    seeds: int
    estimate: float | None  # the claim's ratio; None without records
    low: float | None  # of its 95 % interval
    high: float | None
    paper: float | None  # the same ratio in the paper, if the paper has the numbers
    measured: str  # the ratio in words
    asked: str  # the range in which the ratio must lie
    reason: str  # a likely reason why the claim does not hold; may be empty
    needed: int | None = None
    """The number of seeds that would decide the claim with a probability of 80 %.

    None if the claim is decided, or if the number is unknown.
    """


def decide(claim: Claim, interval: Interval | None) -> str:
    """Return the verdict on a claim, given the interval of its ratio.

    The claim holds if the whole interval lies in its range, and fails if none of the interval does.
    """
    if interval is None:
        return NOT_RUN
    if interval.seeds < _MIN_SEEDS:
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
        [results.values(claim.measure, cell) for cell in claim.numerator],
        [results.values(claim.measure, cell) for cell in claim.denominator],
    )
    verdict, needed = decide(claim, interval), None
    if interval is not None and verdict == UNDECIDED:
        needed = seeds_needed(interval, claim.above, claim.below)
    return Verdict(
        claim=claim.sentence,
        experiment=experiment.name,
        verdict=verdict,
        seeds=0 if interval is None else interval.seeds,
        estimate=None if interval is None else interval.estimate,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        paper=_paper_ratio(experiment, claim),
        measured=_ratio_in_words(claim, experiment.settings),
        asked=_range_in_words(claim),
        reason="" if verdict in (HOLDS, NOT_RUN) else claim.reasons.get(results.worklist.scale, ""),
        needed=needed,
    )


def _paper_ratio(experiment: Experiment, claim: Claim) -> float | None:
    """Return the claim's ratio in the paper; None if the paper lacks one of its numbers."""

    def product(cells: Sequence[str]) -> float | None:
        numbers = [paper_number(experiment.name, cell) for cell in cells]
        values = [n.value for n in numbers if n is not None and n.measure == claim.measure]
        return math.prod(values) if len(values) == len(cells) else None

    numerator, denominator = product(claim.numerator), product(claim.denominator)
    return None if numerator is None or denominator is None else numerator / denominator


def _ratio_in_words(claim: Claim, settings: Sequence[str]) -> str:
    """Return the claim's ratio in words, such as "best validation perplexity: Drop₄ / Drop₁"."""

    def product(cells: Sequence[str]) -> str:
        labels = []
        for cell in cells:
            setting, _, name = cell.partition(":")
            labels.append(method(name).label + (f" on {setting}" if len(settings) > 1 else ""))
        return " × ".join(labels)

    denominator = f" / {product(claim.denominator)}" if claim.denominator else ""
    return f"{MEASURES[claim.measure].label}: {product(claim.numerator)}{denominator}"


def _range_in_words(claim: Claim) -> str:
    if claim.below == math.inf:
        return f"> {claim.above:.3g}"
    return f"{claim.above:.3g} – {claim.below:.3g}"
