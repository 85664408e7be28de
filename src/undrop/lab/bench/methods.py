"""What is timed: one training step, forward and backward, by each method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from undrop.lab.bench.subjects import Subject
from undrop.objectives import Analytic, Dropout, NoRegularization, Objective

__all__ = ["METHODS"]


def _plain_dropout(subject: Subject) -> Callable[[], None]:
    """The baseline: a hand-written step on PyTorch's own best path, without undrop."""

    def step() -> None:
        subject.plain().backward()

    return step


def _by(make: Callable[..., Objective], **options: Any) -> Callable[[Subject], Callable[[], None]]:
    def method(subject: Subject) -> Callable[[], None]:
        batch = {"batch_dim": subject.batch_dim} if make is Analytic else {}
        objective = make(loss=subject.loss, **batch, **options)

        def step() -> None:
            objective(subject.model, subject.inputs, subject.targets).backward()

        return step

    return method


METHODS: dict[str, Callable[[Subject], Callable[[], None]]] = {
    "none": _by(NoRegularization),
    "dropout": _plain_dropout,
    "drop8": _by(Dropout, k=8),
    "reverse-explicit": _by(Analytic, engine="reverse", implicit=False),
    "reverse-both": _by(Analytic, engine="reverse"),
    "tangent-both": _by(Analytic, engine="tangent"),
    "antithetic-both": _by(Analytic, engine="antithetic"),
    "tangent-both-quarter": _by(Analytic, engine="tangent", fraction=0.25),
}
"""From a subject to the step to be timed, by name."""
