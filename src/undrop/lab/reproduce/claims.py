"""Verdicts on claims: a sentence, a ratio with its interval, and whether the claim holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from undrop.lab.reproduce.results import MEASURES, Results
from undrop.lab.reproduce.statistics import Interval, paired_ratio, seeds_needed
from undrop.lab.reproduce.tables import Claim, Experiment, method, paper_number

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
    estimate: float | None  # the ratio that the claim is about; None if nothing was run
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
    """A claim holds if the whole interval lies in its range, and does not if none of it does."""
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
        reason="" if verdict in (HOLDS, NOT_RUN) else claim.reasons.get(results.plan.scale, ""),
        needed=None if undecided is None else seeds_needed(undecided, claim.above, claim.below),
    )


def _paper_ratio(experiment: Experiment, claim: Claim) -> float | None:
    over = _paper_values(experiment, claim, claim.over)
    under = _paper_values(experiment, claim, claim.under)
    return None if over is None or under is None else math.prod(over) / math.prod(under)


def _paper_values(experiment: Experiment, claim: Claim, cells: Sequence[str]) -> list[float] | None:
    numbers = [paper_number(experiment.name, *cell.split(":")) for cell in cells]
    values = [n.value for n in numbers if n is not None and n.measure == claim.measure]
    return values if len(values) == len(cells) else None


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
