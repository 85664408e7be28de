"""Whether dropout helps: the validation loss after some steps without it, minus the loss with it.

Branches of training start from the model's present weights: one with the dropout that the model
declares, one for each site without the dropout there, one without any dropout, and one with more weight
decay. Each repeat uses other batches and masks. The differences of the validation loss form a table for
each branch, with a row for each repeat and a column for each validation batch. Both are random samples.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
"""The number of steps of a branch."""
LEARNING_RATE = 1e-3
"""The learning rate of AdamW, which is used if no optimizer is passed."""
REPEATS = 32
"""The largest number of repeats; more would not reduce the error of the validation batches."""
SHRINKAGE = 0.01
"""The share by which weight decay shrinks the weights in a branch, if no coefficient is passed."""
_P_OFF = 1e-9  # drops nothing, but draws as many random numbers as any other p
_OVERTIME = 3.0  # the first two repeats may take this many times the budget
_ALL_SITES, _WEIGHT_DECAY = object(), object()  # changes of a branch, besides the name of one site


def two_way_error(table: NDArray[np.float64]) -> tuple[float | None, float]:
    """Return the standard error of the mean of a table, and its degrees of freedom.

    Rows (repeats) and columns (validation batches) are both random samples. With mean squares MS of
    rows, columns and residuals of an r × c table, the variance of the mean is
    (MS_rows + MS_columns - MS_residual)/rc. MS_rows/rc and MS_columns/rc are lower limits for it. With
    fewer than two rows or columns, the error is None.
    """
    r, c = table.shape
    if r < 2 or c < 2:
        return None, 0.0
    mean, rows, columns = table.mean(), table.mean(1), table.mean(0)
    residual = table - rows[:, None] - columns[None, :] + mean
    ms_rows = c * float(rows.var(ddof=1))
    ms_columns = r * float(columns.var(ddof=1))
    ms_residual = float((residual**2).sum()) / ((r - 1) * (c - 1))
    total = max(ms_rows + ms_columns - ms_residual, ms_rows, ms_columns)
    if total == 0.0:
        return 0.0, math.inf
    freedom = total**2 / (ms_rows**2 / (r - 1) + ms_columns**2 / (c - 1))
    return math.sqrt(total / (r * c)), max(freedom, float(min(r, c) - 1))


class Benefit(NamedTuple):
    """How much lower the validation loss is after some steps with a dropout, or with weight decay."""

    sites: dict[str, Estimate]
    """The benefit of each site's dropout; NaN if the time ran out before it was measured."""
    every_site: Estimate
    """The benefit of the dropout at all sites together."""
    weight_decay: Estimate
    """The benefit of weight decay with the coefficient ``decay``, in addition to the optimizer's."""
    decay: float
    """The coefficient λ of weight decay."""
    steps: int
    """The number of steps of a branch."""
    optimizer: str
    """The name of the optimizer that takes these steps."""
    learning_rate: float
    repeats: int
    validation_batches: int


class BranchOptimizer:
    """The optimizer that trains the branches.

    Args:
        model: the model whose weights it updates.
        optimizer: the optimizer that trains the model; its state is restored. None uses AdamW.
        learning_rate: the learning rate in the branches; None uses the optimizer's.
        weight_decay: λ of the branch with more weight decay; None uses the λ that shrinks the weights by
            1 % in a branch.

    Raises:
        OptionError: if the optimizer has parameters that the model lacks, or a learning rate of 0.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        learning_rate: float | None,
        weight_decay: float | None,
    ) -> None:
        self.weights = trained_parameters(model)
        if optimizer is None:
            rate = LEARNING_RATE if learning_rate is None else learning_rate
            optimizer = AdamW(self.weights, lr=rate, weight_decay=0.0)
        self._optimizer, self._branch_rate = optimizer, learning_rate
        model_ids = {id(p) for p in model.parameters()}
        if not all(id(p) in model_ids for p in self._parameters()):
            raise OptionError(
                f"the optimizer {self.name} has parameters that {type(model).__name__} lacks: pass the "
                "optimizer that trains this model."
            )
        if not self.learning_rate > 0.0:
            raise OptionError(
                f"the learning rate of {self.name} is {self.learning_rate:g}, so the weights do not "
                "move: pass learning_rate=, such as the one in the middle of training."
            )
        default_decay = SHRINKAGE / (STEPS * self.learning_rate)
        self.decay = default_decay if weight_decay is None else weight_decay

    @property
    def name(self) -> str:
        """The name of the optimizer's class."""
        return type(self._optimizer).__name__

    @property
    def learning_rate(self) -> float:
        """The learning rate in the branches: the largest one, if parameter groups differ."""
        if self._branch_rate is not None:
            return self._branch_rate
        return max(float(group["lr"]) for group in self._optimizer.param_groups)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @contextmanager
    def steps(self, *, more_decay: bool) -> Iterator[Move]:
        """Yield a function that takes a step; on exit, restore the optimizer and all gradients.

        With ``more_decay``, each step also multiplies the weights by 1 - learning rate · λ.
        """
        parameters = self._parameters()
        state = copy.deepcopy(self._optimizer.state_dict())
        saved_gradients = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        if self._branch_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self._branch_rate
        shrink_factor = 1.0 - self.learning_rate * self.decay

        def move(gradients: list[Tensor]) -> None:
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient
            if more_decay:
                torch._foreach_mul_(self.weights, shrink_factor)
            with torch.enable_grad():
                self._optimizer.step()

        try:
            yield move
        finally:
            self._optimizer.load_state_dict(state)
            for p, gradient in zip(parameters, saved_gradients, strict=True):
                p.grad = gradient


def measure_benefit(
    subject: MeasuredModel,
    batches: Sequence[Pair],
    validation: Sequence[Pair],
    budget: Budget,
    optimizer: BranchOptimizer,
    *,
    loss: GivenLoss,
    repeats: int = REPEATS,
    probabilities: Mapping[str, float] | None = None,
) -> Benefit:
    """Train branches until the time is up or the repeats are done, and return the benefits.

    The first two repeats may take three times the budget. The benefits of all sites together and of
    weight decay are measured at least once. ``probabilities`` is p by site; None uses the p that the
    model declares.
    """
    p = {s.name: s.p for s in subject.sites} if probabilities is None else dict(probabilities)
    study = _BenefitStudy(subject, batches, validation, optimizer, p, budget, repeats)
    study.objective.loss = loss
    while study.done < repeats and not (study.done and study.is_over()):
        study.repeat()
    return study.result()


@dataclass
class _BenefitStudy:
    """Collects differences of validation losses between branches."""

    subject: MeasuredModel
    batches: Sequence[Pair]
    validation: Sequence[Pair]
    optimizer: BranchOptimizer
    p: dict[str, float]
    budget: Budget
    repeats: int
    """The largest number of repeats."""

    def __post_init__(self) -> None:
        self.objective = Dropout()
        self.tables: dict[Any, list[NDArray[np.float64]]] = defaultdict(list)
        self.done = 0
        """The number of finished repeats."""

    def is_over(self) -> bool:
        """Return whether the time is up; an error needs two repeats, so those may take longer."""
        limit = 1.0 if self.done > 1 else _OVERTIME
        return self.budget.is_over(self.done / self.repeats) and self.budget.elapsed >= limit

    def repeat(self) -> None:
        """Train a branch with each change while there is time.

        Each repeat starts with another site, so that the time does not always run out at the same one.
        """
        branches = self._new_branches()
        reference = self._losses(branches)
        names, start = list(self.p), self.done % len(self.p)
        for change in (_ALL_SITES, _WEIGHT_DECAY, *names[start:], *names[:start]):
            is_optional = self.done > 0 or isinstance(change, str)
            if is_optional and self.is_over():
                break
            difference = self._losses(branches, change) - reference
            self.tables[change].append(-difference if change is _WEIGHT_DECAY else difference)
        self.done += 1

    def _new_branches(self) -> Branches:
        """Draw the training batches and the seed of a repeat."""
        device = self.optimizer.weights[0].device
        generator = self.subject.generators(device)
        seed = int(torch.randint(2**31, (), generator=generator, device=device))
        numbers = torch.randint(len(self.batches), (STEPS,), generator=generator, device=device)
        batches = [self.batches[i] for i in numbers.tolist()]
        model, weights = self.subject.model, self.optimizer.weights
        return Branches(self.objective, model, weights, batches, self.validation, seed)

    def _losses(self, branches: Branches, change: Any = None) -> NDArray[np.float64]:
        """Train a branch with a change, and return its loss on each validation batch.

        The change is a site without dropout, all sites without dropout, or more weight decay.
        """
        off = set(self.p) if change is _ALL_SITES else {change}
        self.objective.site_p = {name: _P_OFF if name in off else p for name, p in self.p.items()}
        with self.optimizer.steps(more_decay=change is _WEIGHT_DECAY) as move:
            losses = branches.losses(move)
        if losses is None:
            raise NonFiniteError(
                f"{STEPS} steps of {self.optimizer.name} with a learning rate of "
                f"{self.optimizer.learning_rate:g} make the loss of {self.subject.name} not finite: "
                "pass the optimizer= or the learning_rate= that trains this model."
            )
        return np.array(losses)

    def result(self) -> Benefit:
        """Compute the benefits and their errors from the tables."""
        optimizer = self.optimizer
        return Benefit(
            sites={name: _mean_of(self.tables[name]) for name in self.p},
            every_site=_mean_of(self.tables[_ALL_SITES]),
            weight_decay=_mean_of(self.tables[_WEIGHT_DECAY]),
            decay=optimizer.decay,
            steps=STEPS,
            optimizer=optimizer.name,
            learning_rate=optimizer.learning_rate,
            repeats=self.done,
            validation_batches=len(self.validation),
        )


def _mean_of(rows: list[NDArray[np.float64]]) -> Estimate:
    if not rows:
        return Estimate(math.nan, None)
    table = np.array(rows)
    error, freedom = two_way_error(table)
    return Estimate.of(float(table.mean()), error, freedom)
