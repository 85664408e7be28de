"""Whether dropout helps: the validation loss after some steps without it, minus that with it.

Branches of training start from the model's weights: one with the dropout that the model declares, one
for each site without its dropout, one without any dropout, and one with more weight decay. Each repeat
uses different batches and masks. A table of differences has a row for each repeat and a column for each
validation batch; both are random samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from undrop.diagnosis.measure.branches import Branches, Move
from undrop.diagnosis.measure.estimates import Estimate
from undrop.diagnosis.measure.gradients import trained_parameters
from undrop.diagnosis.measure.model import MeasuredModel, Pair
from undrop.diagnosis.measure.timing import Budget
from undrop.errors import NonFiniteError, OptionError
from undrop.losses import GivenLoss
from undrop.objectives import Dropout

STEPS = 20
"""The steps of a branch."""
LEARNING_RATE = 1e-3
"""The learning rate of AdamW, if no optimizer is given."""
REPEATS = 32
"""The largest number of repeats; more would not reduce the error of the validation batches."""
SHRINKAGE = 0.01
"""The share by which weight decay shrinks the weights in a branch, if no coefficient is given."""
_OFF = 1e-9  # a p that drops nothing, but draws as many random numbers as any other
_OVERTIME = 3.0  # two repeats may take this many times the budget
_EVERY, _DECAY = object(), object()  # the branches without any dropout, and with more weight decay


def two_way_error(table: NDArray[np.float64]) -> tuple[float | None, float]:
    """Return the standard error of the mean of a table, and its degrees of freedom.

    Rows (repeats) and columns (validation batches) are both random samples. With mean squares MS of
    rows, columns and residuals of an r × c table, the variance of the mean is
    (MS_rows + MS_columns - MS_residual)/rc, and at least the larger of its first two terms. With fewer
    than two rows or columns, the error is None.
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
    """How much lower the validation loss is after some steps with a dropout, or with weight decay."""

    sites: dict[str, Estimate]
    """The benefit of each site's dropout; NaN if the time ran out before it was measured."""
    every_site: Estimate
    """The benefit of all dropout together."""
    weight_decay: Estimate
    """The benefit of weight decay with the coefficient ``decay``, on top of the optimizer's own."""
    decay: float
    """The coefficient λ of weight decay."""
    steps: int
    """The steps of a branch."""
    optimizer: str
    """The optimizer that takes these steps."""
    learning_rate: float
    repeats: int
    """The number of repeats."""
    validation_batches: int


class BranchOptimizer:
    """The optimizer that trains the branches.

    Args:
        model: the model whose weights it updates.
        optimizer: the optimizer that trains the model, whose state is restored; None is AdamW.
        learning_rate: None uses the optimizer's.
        weight_decay: λ of the branch with more weight decay; None shrinks weights by 1 % in a branch.

    Raises:
        OptionError: for an optimizer that does not fit the model, or a learning rate of 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        learning_rate: float | None,
        weight_decay: float | None,
    ) -> None:
        self.weights = trained_parameters(model)
        rate = LEARNING_RATE if learning_rate is None else learning_rate
        made = AdamW(self.weights, lr=rate, weight_decay=0.0) if optimizer is None else optimizer
        self._optimizer, self._rate = made, learning_rate
        known = {id(p) for p in model.parameters()}
        every = [p for group in made.param_groups for p in group["params"]]
        if not all(id(p) in known for p in every):
            raise OptionError(
                f"the optimizer {self.name} has parameters that {type(model).__name__} lacks: pass the "
                "optimizer that trains this model."
            )
        if not self.learning_rate > 0.0:
            raise OptionError(
                f"the learning rate of {self.name} is {self.learning_rate:g}, so the weights do not "
                "move: pass learning_rate=, such as the one in the middle of training."
            )
        shrinkage = SHRINKAGE / (STEPS * self.learning_rate)
        self.decay = shrinkage if weight_decay is None else weight_decay

    @property
    def name(self) -> str:
        """The name of the optimizer's class."""
        return type(self._optimizer).__name__

    @property
    def learning_rate(self) -> float:
        """The largest learning rate of its parameter groups."""
        if self._rate is not None:
            return self._rate
        return max(float(group["lr"]) for group in self._optimizer.param_groups)

    @contextmanager
    def steps(self, *, more_decay: bool) -> Iterator[Move]:
        """Yield a function that takes a step; on exit, restore the optimizer and all gradients.

        With ``more_decay``, each step also shrinks the weights by the factor 1 - learning rate · λ.
        """
        groups = self._optimizer.param_groups
        every = [p for group in groups for p in group["params"]]
        state = copy.deepcopy(self._optimizer.state_dict())
        gradients = [p.grad for p in every]
        for p in every:
            p.grad = None
        if self._rate is not None:
            for group in groups:
                group["lr"] = self._rate
        kept = 1.0 - self.learning_rate * self.decay

        def move(found: list[Tensor]) -> None:
            for weight, gradient in zip(self.weights, found, strict=True):
                weight.grad = gradient
            if more_decay:
                torch._foreach_mul_(self.weights, kept)
            with torch.enable_grad():
                self._optimizer.step()

        try:
            yield move
        finally:
            self._optimizer.load_state_dict(state)
            for p, gradient in zip(every, gradients, strict=True):
                p.grad = gradient


def measure_benefit(
    measured: MeasuredModel,
    batches: Sequence[Pair],
    validation: Sequence[Pair],
    budget: Budget,
    optimizer: BranchOptimizer,
    *,
    loss: GivenLoss,
    repeats: int = REPEATS,
    probabilities: Mapping[str, float] | None = None,
) -> Benefit:
    """Train branches until the time or the repeats are used up.

    The first two repeats may take three times the budget. All dropout together and weight decay are
    measured at least once. ``probabilities`` are p by site; None uses the p that the model declares.
    """
    p = {s.name: s.p for s in measured.sites} if probabilities is None else dict(probabilities)
    study = _BenefitStudy(measured, batches, validation, optimizer, loss, p)
    while study.repeats < repeats and not (study.repeats and study.late(budget)):
        study.repeat(budget)
    return study.result()


class _BenefitStudy:
    """Collects differences of validation losses, by repeat and by branch."""

    def __init__(
        self,
        measured: MeasuredModel,
        batches: Sequence[Pair],
        validation: Sequence[Pair],
        optimizer: BranchOptimizer,
        loss: GivenLoss,
        p: dict[str, float],
    ) -> None:
        self.measured, self.optimizer, self.p = measured, optimizer, p
        self.batches, self.validation = batches, validation
        self.objective = Dropout()
        self.objective.loss = loss
        self.rows: dict[Any, list[list[float]]] = {_EVERY: [], _DECAY: []}
        self.rows |= {name: [] for name in self.p}
        self.repeats = 0

    def late(self, budget: Budget) -> bool:
        """Return whether the time is up; the two repeats that a standard error needs may take longer."""
        limit = 1.0 if self.repeats > 1 else _OVERTIME
        return budget.spent(self.repeats / REPEATS) and budget.elapsed >= limit

    def repeat(self, budget: Budget) -> None:
        """Train one branch of each kind while there is time, starting from another site each time."""
        branches = self._branches()
        reference = self._losses(branches)
        names, first = list(self.p), self.repeats % len(self.p)
        for place, what in enumerate([_EVERY, _DECAY, *names[first:], *names[:first]]):
            if (place >= 2 or self.repeats) and self.late(budget):
                break
            found = self._losses(branches, what)
            sign = -1.0 if what is _DECAY else 1.0
            pairs = zip(found, reference, strict=True)
            self.rows[what].append([sign * (a - b) for a, b in pairs])
        self.repeats += 1

    def _branches(self) -> Branches:
        device = self.optimizer.weights[0].device
        generator = self.measured.generators(device)
        seed = int(torch.randint(2**31, (), generator=generator, device=device))
        shape = (STEPS,)
        order = torch.randint(len(self.batches), shape, generator=generator, device=device)
        chosen = [self.batches[i] for i in order.tolist()]
        model, weights = self.measured.model, self.optimizer.weights
        return Branches(self.objective, model, weights, chosen, self.validation, seed)

    def _losses(self, branches: Branches, without: Any = None) -> list[float]:
        off = set(self.p) if without is _EVERY else {without}
        self.objective.site_p = {name: _OFF if name in off else p for name, p in self.p.items()}
        with self.optimizer.steps(more_decay=without is _DECAY) as move:
            found = branches.losses(move)
        if found is None:
            raise NonFiniteError(
                f"{STEPS} steps of {self.optimizer.name} with a learning rate of "
                f"{self.optimizer.learning_rate:g} make the loss of {self.measured.name} not finite: "
                "pass the optimizer= or the learning_rate= that trains this model."
            )
        return found

    def result(self) -> Benefit:
        """Return the benefits with their errors, from the tables."""
        optimizer = self.optimizer
        return Benefit(
            sites={name: _estimate(self.rows[name]) for name in self.p},
            every_site=_estimate(self.rows[_EVERY]),
            weight_decay=_estimate(self.rows[_DECAY]),
            decay=optimizer.decay,
            steps=STEPS,
            optimizer=optimizer.name,
            learning_rate=optimizer.learning_rate,
            repeats=self.repeats,
            validation_batches=len(self.validation),
        )


def _estimate(rows: list[list[float]]) -> Estimate:
    if not rows:
        return Estimate(math.nan, None)
    table = np.array(rows)
    error, freedom = two_way_error(table)
    return Estimate.of(float(table.mean()), error, freedom)
