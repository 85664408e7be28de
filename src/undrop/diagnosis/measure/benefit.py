"""Whether dropout helps: how much a site's explicit part lowers the validation loss per step.

With R_i = strength · E[u_iᵀHu_i], u_i from noise at site i alone, one gradient step of size γ

    W ← W - γ(∇L + Σ_i ∇R_i)    changes the validation loss by    -γ Σ_i ⟨∇L_val, ∇R_i⟩ + O(γ²),

so benefit_i = ⟨∇L_val, ∇R_i⟩ is what site i takes off the validation loss per step and unit of learning
rate. It is positive where more of this dropout helps and negative where the dropout is in the way.
Weight decay is such a term too, with ∇R = λW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from undrop.diagnosis.measure.analytic import AnalyticNoise, analytic_term, gradient
from undrop.diagnosis.measure.batches import NumberedBatch
from undrop.diagnosis.measure.estimates import Estimate
from undrop.diagnosis.measure.gradients import trained_parameters
from undrop.diagnosis.measure.model import MeasuredModel
from undrop.diagnosis.measure.timing import Budget
from undrop.engines import as_engine
from undrop.intercept import Interception, Selection, call, keep_statistics, logits_of, no_noise
from undrop.losses import Loss

_GROUPS = 8  # of validation batches, whose gradients are held
_LEAST = 2  # training samples


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """⟨a, b⟩ over lists of tensors, in float64."""
    return math.fsum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def validation_gradient(
    model: nn.Module, inputs: Any, targets: Any, loss: Loss, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """∇L_val on one batch, with every dropout off; keeps running statistics."""
    with keep_statistics(model), Interception(model, no_noise):
        logits = logits_of(call(model, inputs))
    loss.check(logits, targets)
    return gradient(loss.value(logits, targets), parameters)


def site_gradient(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss: Loss,
    parameters: Sequence[Tensor],
    site: str,
    *,
    strength: float,
    generator: Callable[[torch.device], torch.Generator],
    noise: AnalyticNoise | None = None,
) -> list[Tensor]:
    """∇R_i for one draw of η at one site, an unbiased sample of its expectation.

    Args:
        model: in train mode.
        inputs: of a training batch.
        targets: of a training batch.
        loss: the training loss.
        parameters: the trainable ones.
        site: the name of the site.
        strength: the factor of uᵀHu: ½ for dropout, an objective's own for ``Analytic``.
        generator: gives the random generator for a device.
        noise: the engine, the mask structure and the fraction; its selection is not used.
    """
    made = AnalyticNoise() if noise is None else noise
    alone = AnalyticNoise(
        made.engine, made.mask, Selection({_literal(site): 1.0}), made.fraction, made.batch_dim
    )
    term = analytic_term(model, inputs, targets, loss, generator, alone, explicit=strength)
    return gradient(term, parameters)


def _literal(name: str) -> str:
    """A pattern that matches this name alone: ``[`` would open a set of characters."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def two_way_error(table: NDArray[np.float64]) -> tuple[float | None, float]:
    """The standard error of the mean of a table, and its degrees of freedom.

    Rows (training batches) and columns (validation batches) are both random samples. With mean
    squares MS of rows, columns and residuals of an r × c table, the variance of the mean is
    (MS_rows + MS_columns - MS_residual)/rc, at least the larger of its first two terms. None where
    there are fewer than two rows or columns.
    """
    r, c = table.shape
    if r < 2 or c < 2:
        return None, 0.0
    mean, rows, columns = table.mean(), table.mean(1), table.mean(0)
    residual = table - rows[:, None] - columns[None, :] + mean
    by_row = c * float(rows.var(ddof=1))
    by_column = r * float(columns.var(ddof=1))
    rest = float((residual**2).sum()) / ((r - 1) * (c - 1))
    total = max(by_row + by_column - rest, by_row, by_column)
    if total == 0.0:
        return 0.0, math.inf
    freedom = total**2 / (by_row**2 / (r - 1) + by_column**2 / (c - 1))
    return math.sqrt(total / (r * c)), max(freedom, float(min(r, c) - 1))


class Benefit(NamedTuple):
    """How much each explicit part lowers the validation loss, per 1,000 steps.

    To first order and for plain gradient steps of the learning rate; positive helps.
    """

    sites: dict[str, Estimate]
    every_site: Estimate
    """All sites together."""
    weight_decay: Estimate
    """Weight decay with the coefficient ``decay``."""
    decay: float
    """λ: the given coefficient, or the one whose push λ‖W‖ is as large as that of all dropout."""
    decay_given: bool
    learning_rate: float
    strength: float
    batches: int
    validation_batches: int
    samples: int
    """Training samples of ∇R_i per site."""


def measure_benefit(
    measured: MeasuredModel,
    validation: Sequence[NumberedBatch],
    budget: Budget,
    *,
    learning_rate: float,
    weight_decay: float | None = None,
    strength: float = 0.5,
    engine: str = "auto",
    draws: int | None = None,
) -> Benefit:
    """Measure the benefit of every site until the time or the draws are used up.

    Args:
        measured: the model with its training batches.
        validation: batches of other data.
        budget: the time; every site is sampled on two batches in any case.
        learning_rate: γ.
        weight_decay: λ; None takes the one whose push is as large as dropout's.
        strength: the factor of uᵀHu: ½ for dropout.
        engine: how u is computed.
        draws: the largest number of samples per site and training batch; None uses all the time.
    """
    study = _Study(measured, validation, strength, AnalyticNoise(as_engine(engine)))
    rounds = None if draws is None else max(1, draws)
    for batch in budget.visits(measured.batches, rounds, least=_LEAST):
        study.visit(batch)
    return study.result(learning_rate, weight_decay)


class _Study:
    """Products of ∇L_val (by group of validation batches) with ∇R_i (by training batch)."""

    def __init__(
        self,
        measured: MeasuredModel,
        validation: Sequence[NumberedBatch],
        strength: float,
        noise: AnalyticNoise,
    ) -> None:
        self.measured, self.strength, self.noise = measured, strength, noise
        self.parameters = trained_parameters(measured.model)
        self.validation_batches = len(validation)
        self.groups = self._validation_groups(validation)
        self.rows: dict[str, dict[int, list[NDArray[np.float64]]]] = {
            name: {} for name in measured.sites.names
        }
        self.samples = 0
        self._sum: list[Tensor] | None = None  # of ∇R over samples, and of ‖∇R‖²
        self._squares = 0.0

    def _validation_groups(self, validation: Sequence[NumberedBatch]) -> list[list[Tensor]]:
        """The mean gradient of each group of validation batches, at most ``_GROUPS`` of them."""
        groups = []
        for start in range(min(_GROUPS, len(validation))):
            members = validation[start::_GROUPS]
            found = [self._validation(batch) for batch in members]
            groups.append([torch.stack(parts).mean(0) for parts in zip(*found, strict=True)])
        return groups

    def _validation(self, batch: NumberedBatch) -> list[Tensor]:
        self.measured.restart_randomness()
        return validation_gradient(
            self.measured.model, batch.inputs, batch.targets, self.measured.loss, self.parameters
        )

    def visit(self, batch: NumberedBatch) -> None:
        """Sample ∇R_i of every site once on a training batch."""
        total: list[Tensor] | None = None
        for name, rows in self.rows.items():
            push = site_gradient(
                self.measured.model,
                batch.inputs,
                batch.targets,
                self.measured.loss,
                self.parameters,
                name,
                strength=self.strength,
                generator=self.measured.generators,
                noise=self.noise,
            )
            row = np.array([inner(group, push) for group in self.groups])
            rows.setdefault(batch.number, []).append(row)
            total = push if total is None else [a + b for a, b in zip(total, push, strict=True)]
        assert total is not None
        self.samples += 1
        self._squares += inner(total, total)
        before = [torch.zeros_like(t) for t in total] if self._sum is None else self._sum
        self._sum = [a + b for a, b in zip(before, total, strict=True)]

    def result(self, learning_rate: float, weight_decay: float | None) -> Benefit:
        """Read the products, in loss per 1,000 steps."""
        steps = 1000.0 * learning_rate
        tables = {name: self._table(rows) for name, rows in self.rows.items()}
        every = np.sum(list(tables.values()), axis=0)
        decay = self._matched_decay() if weight_decay is None else weight_decay
        weights = [p.detach() for p in self.parameters]
        columns = np.array([inner(group, weights) for group in self.groups])
        freedom = len(columns) - 1.0
        error = float(columns.std(ddof=1)) / math.sqrt(len(columns)) if freedom else None
        return Benefit(
            sites={name: _estimate(table).scaled(steps) for name, table in tables.items()},
            every_site=_estimate(every).scaled(steps),
            weight_decay=Estimate.of(float(columns.mean()), error, freedom).scaled(decay * steps),
            decay=decay,
            decay_given=weight_decay is not None,
            learning_rate=learning_rate,
            strength=self.strength,
            batches=len(next(iter(self.rows.values()))),
            validation_batches=self.validation_batches,
            samples=self.samples,
        )

    def _table(self, rows: dict[int, list[NDArray[np.float64]]]) -> NDArray[np.float64]:
        """One row per training batch; one per draw if there is only one batch."""
        if len(rows) == 1:
            return np.stack(next(iter(rows.values())))
        return np.stack([np.mean(draws, axis=0) for draws in rows.values()])

    def _matched_decay(self) -> float:
        """‖E∇R‖ / ‖W‖; products of different samples only, so that noise does not enlarge it."""
        assert self._sum is not None
        n = self.samples
        square = inner(self._sum, self._sum) - self._squares
        norm = math.sqrt(max(square, 0.0) / (n * (n - 1))) if n > 1 else math.sqrt(self._squares)
        weights = [p.detach() for p in self.parameters]
        size = math.sqrt(inner(weights, weights))
        return norm / size if size else 0.0


def _estimate(table: NDArray[np.float64]) -> Estimate:
    error, freedom = two_way_error(table)
    return Estimate.of(float(table.mean()), error, freedom)
