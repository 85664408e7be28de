"""The whole study: collect batches, take the explicit and the implicit effect apart, give advice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undrop.diagnosis.measure.explicit import measure_explicit
from undrop.diagnosis.measure.implicit import measure_implicit
from undrop.diagnosis.measure.model import Subject, collect
from undrop.diagnosis.measure.timing import Budget, checked_seconds, progress_bar
from undrop.diagnosis.report.advice import advise
from undrop.diagnosis.report.result import Diagnosis
from undrop.errors import OptionError
from undrop.losses import Loss

__all__ = ["diagnose"]

_EXPLICIT = 0.6  # of the time


def diagnose(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | Callable[[Tensor, Any], Tensor] | None = None,
    implicit: bool = True,
    seconds: float = 30.0,
    draws: int = 64,
    max_batches: int = 16,
    classes: Sequence[str] | None = None,
    batch_dim: int = 0,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Tell what dropout does in a model, site by site, with standard errors.

    The model is left as it was: its mode, buffers, gradients and torch's random state.

    Args:
        model: any module with dropout, in train or eval mode.
        batches: pairs (inputs, targets), inputs as for an objective; a DataLoader will do.
        loss: as for an objective: None is cross-entropy on the model's output.
        implicit: whether to measure gradient noise as well.
        seconds: the time there is; the more, the smaller the errors. A little is done in any case.
        draws: the most masks a batch, for studies that end before their time.
        max_batches: the most batches to take.
        classes: what the output's classes are called.
        batch_dim: the dimension of targets that counts examples.
        generator: where masks come from; with it and enough seconds the figures are reproducible.
        progress: whether to show a bar on stderr, where that is a terminal.

    Raises:
        DataError: if there are no batches, or they are not pairs.
        NoDropoutError: if the model has no active dropout.
        NonFiniteError: if a loss is not finite.
    """
    checked_seconds(seconds)
    for name, value, least in (("draws", draws, 2), ("max_batches", max_batches, 1)):
        if value < least:
            raise OptionError(f"{name} must be at least {least}, got {value}.")
    began = time.monotonic()
    subject = Subject(
        model, collect(batches, max_batches), loss=loss, generator=generator, batch_dim=batch_dim
    )
    cut = _EXPLICIT if implicit else 1.0
    with progress_bar(progress) as show, subject.studied():
        budget = Budget(cut * seconds, show, of=(0.0, cut), what="explicit effect")
        explicit = measure_explicit(subject, budget, draws=draws, names=classes)
        noise = None
        if implicit:
            budget = Budget((1.0 - cut) * seconds, show, of=(cut, 1.0), what="implicit effect")
            noise = measure_implicit(subject, budget, draws=draws)
    return Diagnosis(
        model=subject.name,
        sites=subject.sites,
        explicit=explicit,
        implicit=noise,
        advice=advise(subject.sites, explicit, noise),
        seconds=time.monotonic() - began,
    )
