"""``undrop.diagnose``: measure the explicit and implicit effect and the benefit, and conclude."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from undrop.diagnosis.measure.benefit import REPEATS, Benefit, BranchOptimizer, measure_benefit
from undrop.diagnosis.measure.explicit import Explicit, measure_explicit
from undrop.diagnosis.measure.implicit import Implicit, measure_implicit
from undrop.diagnosis.measure.model import MeasuredModel, Pair, collect, shared_examples
from undrop.diagnosis.measure.timing import Budget, check_seconds
from undrop.diagnosis.report.advice import advise, conclude
from undrop.diagnosis.report.provenance import provenance_of
from undrop.diagnosis.report.result import Diagnosis
from undrop.errors import DataError, OptionError
from undrop.losses import Loss, as_loss
from undrop.options import as_float
from undrop.report import Bar, Progress

_TIME = {"explicit effect": 3.0, "implicit effect": 2.0, "benefit": 2.0}
"""How the time is divided between the measurements."""
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

    The model is left as it was: its mode, buffers, gradients and random generators.

    Args:
        model: any module with dropout, in train or eval mode.
        batches: pairs (inputs, targets) of training data, such as a DataLoader.
        validation: pairs of other data. With them, a diagnosis measures the benefit of every site:
            the validation loss after 20 steps without it, minus that after 20 steps with it.
        optimizer: the optimizer that trains the model; None uses AdamW. It takes these steps, and its
            state is restored.
        learning_rate: the learning rate of these steps; None uses the optimizer's, or 0.001 for AdamW.
            At the end of a schedule, pass the learning rate in the middle of it.
        weight_decay: the weight decay whose benefit is measured too; None uses the one that shrinks the
            weights by 1 % in 20 steps.
        loss: as for an objective.
        implicit: whether to measure gradient noise as well.
        seconds: the time to spend; more time gives smaller errors. A diagnosis takes longer if the
            minimum number of samples does not fit in it.
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
    _check(seconds, draws, max_batches, optimizer, learning_rate, weight_decay)
    began = time.monotonic()
    own, held = _collected(batches, validation, max_batches, batch_dim)
    measured = MeasuredModel(model, own, loss=loss, generator=generator)
    update = (
        BranchOptimizer(measured.model, optimizer, learning_rate, weight_decay) if held else None
    )
    noise = benefit = None
    with Progress(progress) as shown, measured.preserved():
        budgets = _budgets((True, implicit, update is not None), seconds, shown.bar())
        explicit = measure_explicit(measured, next(budgets), draws=draws, names=classes)
        if implicit:
            noise = measure_implicit(measured, next(budgets), draws=draws)
        if update is not None:
            repeats = min(draws or REPEATS, REPEATS)
            benefit = measure_benefit(
                measured, own, held, next(budgets), update, loss=as_loss(loss), repeats=repeats
            )
    return _result(measured, explicit, noise, benefit, held, time.monotonic() - began)


def _check(
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
    for name, value, least in (("draws", draws, 2), ("max_batches", max_batches, 1)):
        if value is not None and value < least:
            raise OptionError(f"{name} must be at least {least}, got {value}.")
    for what, size in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if size is not None and not 0.0 < as_float(size) < float("inf"):
            raise OptionError(f"{what} must be positive and finite, got {size!r}.")


def _collected(
    batches: Iterable[Any], validation: Iterable[Any] | None, most: int, batch_dim: int
) -> tuple[list[Pair], list[Pair]]:
    """Return training and validation batches; refuse validation data that is training data."""
    if validation is None:
        return collect(batches, most), []
    if validation is batches:
        raise DataError(_SAME_DATA.format("validation is the training data itself"))
    held = collect(validation, most, name="validation batches")
    own = collect(batches, most)
    held_inputs = [inputs for inputs, _ in held]
    counts = [shared_examples(inputs, held_inputs, batch_dim) for inputs, _ in own]
    known, total = (sum(column) for column in zip(*counts, strict=True))
    if total and known > total // 2:
        shared = (
            f"{known} of {total} examples of the training batches are in the validation data too"
        )
        raise DataError(_SAME_DATA.format(shared))
    return own, held


def _budgets(wanted: Sequence[bool], seconds: float, bar: Bar) -> Iterator[Budget]:
    """Yield the budget of each measurement in ``_TIME`` that is wanted.

    It is a share of the time that is left, and at least half of the planned time.
    """
    began, done = time.monotonic(), 0.0
    times = {name: part for (name, part), on in zip(_TIME.items(), wanted, strict=True) if on}

    def show(done: float, what: str) -> None:
        bar.show(done, title=what)

    for name, part in times.items():
        end = done + part / sum(times.values())
        left = seconds - (time.monotonic() - began)
        share = (end - done) / (1.0 - done)
        yield Budget(
            max(share * left, 0.5 * (end - done) * seconds), show, span=(done, end), what=name
        )
        done = end


def _result(
    measured: MeasuredModel,
    explicit: Explicit,
    implicit: Implicit | None,
    benefit: Benefit | None,
    validation: Sequence[Pair],
    seconds: float,
) -> Diagnosis:
    return Diagnosis(
        model=measured.name,
        sites=measured.sites,
        explicit=explicit,
        implicit=implicit,
        benefit=benefit,
        conclusion=conclude(explicit, implicit, benefit),
        advice=advise(measured.sites, explicit, implicit, benefit),
        provenance=provenance_of(
            measured.model, measured.batches, validation, seconds=seconds, masks=explicit.masks
        ),
    )
