"""``undrop.diagnose``: measure dropout's explicit effect, implicit effect and benefit, and conclude."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from undrop.diagnosis.measure.benefit import REPEATS, BranchOptimizer, measure_benefit
from undrop.diagnosis.measure.explicit import measure_explicit
from undrop.diagnosis.measure.implicit import measure_implicit
from undrop.diagnosis.measure.model import MeasuredModel, Pair, collect, shared_examples
from undrop.diagnosis.measure.timing import Budget, check_seconds
from undrop.diagnosis.report.advice import conclude, recommend
from undrop.diagnosis.report.provenance import provenance_of
from undrop.diagnosis.report.result import Diagnosis
from undrop.errors import DataError, OptionError
from undrop.losses import Loss, as_loss
from undrop.options import as_float
from undrop.report import Bar, Progress

_TIME_WEIGHTS = {"explicit effect": 3.0, "implicit effect": 2.0, "benefit": 2.0}
"""The measurements, and the weights by which they share the time."""
_SAME_DATA = "{}, on which every regularizer looks harmful: pass batches of other data."


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    validation: Iterable[Any] | None = None,
    optimizer: Optimizer | None = None,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    loss: Loss | Callable[[Tensor, Any], Tensor] | None = None,
    implicit: bool = True,
    seconds: float = 30.0,
    draws: int | None = None,
    max_batches: int = 16,
    classes: Sequence[str] | None = None,
    batch_dim: int = 0,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Measure what dropout does in a model, site by site, with standard errors.

    The model does not change: its mode, buffers, gradients and random generators stay the same.

    Args:
        model: any module with dropout, in train or eval mode.
        batches: pairs (inputs, targets) of training data, such as a DataLoader.
        validation: pairs of other data. With them, a diagnosis measures the benefit of every site: the
            validation loss after 20 steps without the dropout there, minus the loss after 20 steps with
            it.
        optimizer: the optimizer that trains the model; None uses AdamW. It takes these 20 steps, and its
            state is restored.
        learning_rate: the learning rate of these 20 steps; None uses the optimizer's, or 0.001 for
            AdamW. At the end of a schedule, pass the learning rate in the middle of it.
        weight_decay: a weight decay, whose benefit is measured as well; None uses the one that shrinks
            the weights by 1 % in 20 steps.
        loss: as for an objective.
        implicit: whether to measure gradient noise as well.
        seconds: the time to spend; more time gives smaller errors. A diagnosis takes longer if the
            minimum number of samples does.
        draws: the largest number of masks per batch; None uses all the time. With ``draws``, a
            generator and enough seconds, the figures are reproducible.
        max_batches: the largest number of training and of validation batches to use.
        classes: the names of the output's classes.
        batch_dim: the dimension of the examples in the inputs.
        generator: seeds the masks.
        progress: whether to show a bar on stderr, if that is a terminal.

    Raises:
        DataError: if there are no batches, or they are not pairs.
        NoDropoutError: if the model has no active dropout.
        NonFiniteError: if a loss is not finite.
        OutputError: if the model draws random numbers that can't be repeated.
    """
    _check_options(seconds, draws, max_batches, optimizer, learning_rate, weight_decay)
    start = time.monotonic()
    training, held_out = _collect_both(batches, validation, max_batches, batch_dim)
    subject = MeasuredModel(model, training, loss=loss, generator=generator)
    branch_optimizer = noise = benefit = None
    if held_out:
        branch_optimizer = BranchOptimizer(subject.model, optimizer, learning_rate, weight_decay)
    with Progress(progress) as bars, subject.preserve():
        budgets = _budgets((True, implicit, bool(held_out)), seconds, bars.bar())
        explicit = measure_explicit(subject, next(budgets), draws=draws, names=classes)
        if implicit:
            noise = measure_implicit(subject, next(budgets), draws=draws)
        if branch_optimizer is not None:
            benefit = measure_benefit(
                *(subject, training, held_out, next(budgets), branch_optimizer),
                loss=as_loss(loss),
                repeats=min(draws or REPEATS, REPEATS),
            )
    taken = time.monotonic() - start
    return Diagnosis(
        model=subject.name,
        sites=subject.sites,
        explicit=explicit,
        implicit=noise,
        benefit=benefit,
        conclusion=conclude(explicit, noise, benefit),
        advice=recommend(subject.sites, explicit, noise, benefit),
        provenance=provenance_of(subject, held_out, seconds=taken, masks=explicit.masks),
    )


def _check_options(
    seconds: float,
    draws: int | None,
    max_batches: int,
    optimizer: Any,
    learning_rate: float | None,
    weight_decay: float | None,
) -> None:
    check_seconds(seconds)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise OptionError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}.")
    for name, count, minimum in (("draws", draws, 2), ("max_batches", max_batches, 1)):
        if count is not None and count < minimum:
            raise OptionError(f"{name} must be at least {minimum}, got {count}.")
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if value is not None and not 0.0 < as_float(value) < float("inf"):
            raise OptionError(f"{name} must be positive and finite, got {value!r}.")


def _collect_both(
    batches: Iterable[Any], validation: Iterable[Any] | None, limit: int, batch_dim: int
) -> tuple[list[Pair], list[Pair]]:
    """Return training and validation batches; refuse validation data that is mostly training data."""
    if validation is None:
        return collect(batches, limit), []
    if validation is batches:
        raise DataError(_SAME_DATA.format("validation is the training data itself"))
    held_out = collect(validation, limit, name="validation batches")
    training = collect(batches, limit)
    held_out_inputs = [inputs for inputs, _ in held_out]
    counts = [shared_examples(inputs, held_out_inputs, batch_dim) for inputs, _ in training]
    shared, total = map(sum, zip(*counts, strict=True))
    if total and shared > total // 2:
        examples = f"{shared} of {total} examples of the training batches"
        raise DataError(_SAME_DATA.format(f"{examples} are in the validation data too"))
    return training, held_out


def _budgets(wanted: Sequence[bool], seconds: float, bar: Bar) -> Iterator[Budget]:
    """Yield a budget for each wanted measurement, in the order of ``_TIME_WEIGHTS``.

    A budget is the measurement's part of the time that is left, but at least half of its planned time.
    """
    end, done = time.monotonic() + seconds, 0.0
    weights = dict(compress(_TIME_WEIGHTS.items(), wanted))
    for name, weight in weights.items():
        part = weight / sum(weights.values())
        time_left = end - time.monotonic()
        budget = max(time_left * part / (1.0 - done), 0.5 * part * seconds)
        yield Budget(budget, partial(bar.show, title=name), (done, done + part))
        done += part
