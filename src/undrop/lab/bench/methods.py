"""The methods that are timed: each turns a subject into one training step, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from undrop.lab.bench.subjects import Subject
from undrop.objectives import Analytic, Dropout, NoRegularization, Objective
from undrop.registry import Registry

Step: TypeAlias = Callable[[], None]

METHODS: Registry[str, Callable[[Subject], Step]] = Registry("bench method")
"""The methods by name, in the order in which they are shown."""

BASELINE = "dropout"
"""The method that all others are compared with."""


def _step(subject: Subject, objective: Objective) -> Step:
    return lambda: objective(subject.model, subject.inputs, subject.targets).backward()


@METHODS.register("none")
def none(subject: Subject) -> Step:
    """The loss alone."""
    return _step(subject, NoRegularization(loss=subject.loss))


@METHODS.register("dropout")
def dropout(subject: Subject) -> Step:
    """The baseline: a hand-written step on PyTorch's own fastest path, without undrop."""
    return lambda: subject.plain().backward()


@METHODS.register("drop8")
def drop8(subject: Subject) -> Step:
    """Drop_8, the mean over eight masks."""
    return _step(subject, Dropout(k=8, loss=subject.loss))


def analytic(subject: Subject, **options: Any) -> Step:
    """Both analytic parts."""
    return _step(subject, Analytic(loss=subject.loss, batch_dim=subject.batch_dim, **options))


METHODS.register("reverse-explicit")(partial(analytic, engine="reverse", implicit=False))
METHODS.register("reverse-both")(partial(analytic, engine="reverse"))
METHODS.register("tangent-both")(partial(analytic, engine="tangent"))
METHODS.register("antithetic-both")(partial(analytic, engine="antithetic"))
METHODS.register("antithetic-both-quarter")(partial(analytic, engine="antithetic", fraction=0.25))
METHODS.register("antithetic-both-eighth")(partial(analytic, engine="antithetic", fraction=0.125))
