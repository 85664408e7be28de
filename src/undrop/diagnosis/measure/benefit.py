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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from undrop.diagnosis.measure.analytic import AnalyticNoise, analytic_term, gradient
from undrop.intercept import Interception, Selection, call, keep_statistics, logits_of, silent
from undrop.losses import Loss

__all__ = ["inner", "site_gradient", "two_way_error", "validation_gradient"]


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """⟨a, b⟩ over lists of tensors, in float64."""
    return math.fsum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))


def validation_gradient(
    model: nn.Module, inputs: Any, targets: Any, loss: Loss, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """∇L_val on one batch, with every dropout off; running statistics stay as they are."""
    with keep_statistics(model), Interception(model, silent):
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
        loss: the loss that is trained.
        parameters: those that are trained.
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
