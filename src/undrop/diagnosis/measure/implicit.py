"""The implicit effect: dropout's gradient noise beside ξ_approx and beside that of mini-batching."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrop.diagnosis.measure.covariance import cosine, overlap, trace_of_means
from undrop.diagnosis.measure.estimates import Draws, Estimate
from undrop.diagnosis.measure.gradients import GradientNoise, Sketch
from undrop.diagnosis.measure.model import Subject
from undrop.diagnosis.measure.timing import Budget

__all__ = ["Group", "Implicit", "Overlap", "Shrinking", "measure_implicit"]

PLACES = 1 << 16
"""Of the sketch by which gradients are kept; smaller models are kept whole."""
_KS = (1, 2, 4, 8)
_DIRECTIONS = 5  # of the leading eigenspace
_LEAST = 4  # samples of each kind


class Group(NamedTuple):
    """The traces of one part of the model."""

    trace_dropout: Estimate
    trace_analytic: Estimate
    trace_batch: Estimate | None
    parameters: int

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "trace_dropout": self.trace_dropout.to_json(),
            "trace_analytic": self.trace_analytic.to_json(),
            "trace_batch": None if self.trace_batch is None else self.trace_batch.to_json(),
            "parameters": self.parameters,
        }


class Overlap(NamedTuple):
    """How much two leading eigenspaces agree: ‖U₁ᵀU₂‖²_F / k, from samples."""

    value: Estimate
    """Of dropout's and of ξ_approx's, from half of the samples each."""
    ceiling: Estimate
    """Of dropout's from one half and from the other half: as much as so few samples can show."""
    chance: float
    """Of two random spaces."""
    directions: int
    """k."""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            **self.value.to_json(),
            "ceiling": self.ceiling.to_json(),
            "chance": self.chance,
            "directions": self.directions,
        }


class Shrinking(NamedTuple):
    """The trace of the mean of k samples of noise, times k: the same for every k if it goes as 1/k."""

    k: int
    dropout: Estimate
    analytic: Estimate

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {"k": self.k, "dropout": self.dropout.to_json(), "analytic": self.analytic.to_json()}


@dataclass(frozen=True)
class Implicit:
    """The implicit effect of a model's dropout: covariances of gradient noise."""

    trace_dropout: Estimate
    trace_analytic: Estimate
    trace_batch: Estimate | None
    """None where there are fewer than two batches."""
    analytic_ratio: Estimate
    """trace_analytic / trace_dropout."""
    batch_ratio: Estimate | None
    """trace_dropout / trace_batch."""
    cosine: Estimate
    """Of the diagonals of dropout's and of ξ_approx's covariance."""
    overlap: Overlap
    groups: dict[str, Group]
    shrinking: list[Shrinking]
    samples: int
    parameters: int
    kept: int
    """Numbers kept of each gradient; fewer than parameters where it was sketched."""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "trace_dropout": self.trace_dropout.to_json(),
            "trace_analytic": self.trace_analytic.to_json(),
            "trace_batch": None if self.trace_batch is None else self.trace_batch.to_json(),
            "analytic_ratio": self.analytic_ratio.to_json(),
            "batch_ratio": None if self.batch_ratio is None else self.batch_ratio.to_json(),
            "cosine": self.cosine.to_json(),
            "overlap": self.overlap.to_json(),
            "groups": {name: group.to_json() for name, group in self.groups.items()},
            "k": [point.to_json() for point in self.shrinking],
            "samples": self.samples,
            "parameters": self.parameters,
            "kept": self.kept,
        }


def measure_implicit(subject: Subject, budget: Budget, *, draws: int) -> Implicit:
    """Measure the implicit effect until the time or the draws are used up.

    Args:
        subject: the model under study.
        budget: the time there is; four samples are taken in any case.
        draws: the most samples of each kind a batch.
    """
    study = _Study(subject)
    study.between_batches(budget)
    study.within_batches(budget, draws)
    return study.result()


class _Study:
    """Samples as they come: traces by group in full, directions and squares as sketches."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.noise = GradientNoise(subject)
        device = next(subject.model.parameters()).device
        self.sketch = Sketch(self.noise.size, PLACES, device)
        self.table = Draws()
        self.batch_table = Draws()
        self.directions: dict[str, list[Tensor]] = {"dropout": [], "analytic": []}
        self.squares: dict[str, list[Tensor]] = {"dropout": [], "analytic": []}
        self.sizes: dict[str, int] = {}
        for group, parameter in zip(self.noise.groups, self.noise.parameters, strict=True):
            self.sizes[group] = self.sizes.get(group, 0) + parameter.numel()

    def between_batches(self, budget: Budget) -> None:
        """Pairs of batches that share none; the time of a fifth of the budget at most."""
        batches = self.subject.batches
        for pair, (one, two) in enumerate(zip(batches[::2], batches[1::2], strict=False)):
            if pair > 1 and budget.elapsed > 0.2:
                return
            self.batch_table.add(pair, 1.0, self._traces("batch", self.noise.between(one, two)))

    def within_batches(self, budget: Budget, draws: int) -> None:
        """Round the batches, one sample of dropout's noise and one of ξ_approx each time."""
        batches = self.subject.batches
        for turn in range(max(draws, math.ceil(_LEAST / len(batches)))):
            for place, batch in enumerate(batches):
                taken = turn * len(batches) + place
                if budget.spent(taken / (draws * len(batches))) and taken >= _LEAST:
                    return
                samples = {
                    "dropout": self.noise.dropout(batch),
                    "analytic": self.noise.analytic(batch),
                }
                row: dict[str, float] = {}
                for kind, sample in samples.items():
                    row |= self._traces(kind, sample)
                    self.directions[kind].append(self.sketch(sample))
                    self.squares[kind].append(self.sketch([part.square() for part in sample]))
                self.table.add(batch.number, 1.0, row)

    def _traces(self, kind: str, sample: list[Tensor]) -> dict[str, float]:
        """The squared norm, of all and by group: a sample of the covariance's trace."""
        row = dict.fromkeys((f"{kind} {group}" for group in self.sizes), 0.0)
        for group, part in zip(self.noise.groups, sample, strict=True):
            row[f"{kind} {group}"] += float(part.double().square().sum())
        return {kind: math.fsum(row.values()), **row}

    def result(self) -> Implicit:
        """Compare the covariances."""
        drop, analytic = (torch.stack(self.directions[kind]) for kind in self.directions)
        has_batches = self.batch_table.batches > 0
        trace_batch = self.batch_table.mean("batch") if has_batches else None
        trace_dropout = self.table.mean("dropout")
        return Implicit(
            trace_dropout=trace_dropout,
            trace_analytic=self.table.mean("analytic"),
            trace_batch=trace_batch,
            analytic_ratio=self.table.ratio({"analytic": 1.0}, {"dropout": 1.0}),
            batch_ratio=None if trace_batch is None else _quotient(trace_dropout, trace_batch),
            cosine=cosine(*(torch.stack(self.squares[kind]) for kind in self.squares)),
            overlap=_overlap(drop, analytic, self.sketch.places),
            groups={group: self._group(group) for group in self.sizes},
            shrinking=[
                Shrinking(k, trace_of_means(drop, k), trace_of_means(analytic, k))
                for k in _KS
                if len(drop) >= 2 * k
            ],
            samples=len(drop),
            parameters=self.noise.size,
            kept=self.sketch.places,
        )

    def _group(self, group: str) -> Group:
        has_batches = self.batch_table.batches > 0
        return Group(
            self.table.mean(f"dropout {group}"),
            self.table.mean(f"analytic {group}"),
            self.batch_table.mean(f"batch {group}") if has_batches else None,
            self.sizes[group],
        )


def _overlap(drop: Tensor, analytic: Tensor, places: int) -> Overlap:
    k = max(1, min(_DIRECTIONS, len(drop) // 4))
    return Overlap(overlap(drop, analytic, k), overlap(drop, drop, k), min(1.0, k / places), k)


def _quotient(a: Estimate, b: Estimate) -> Estimate:
    """A ratio of independent figures."""
    if b.value == 0.0:
        return Estimate(math.nan, None)
    value = a.value / b.value
    if a.stderr is None or b.stderr is None:
        return Estimate(value, None)
    return Estimate(value, math.hypot(a.stderr, value * b.stderr) / abs(b.value))
