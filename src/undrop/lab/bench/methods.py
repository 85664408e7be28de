"""The methods that are timed: each turns a subject into one training step, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from undrop.lab.bench.subjects import Subject
from undrop.objectives import Analytic, Dropout, NoRegularization, Objective
from undrop.registry import Registry

__all__ = ["BASELINE", "METHODS"]

Step: TypeAlias = Callable[[], None]

METHODS: Registry[str, Callable[[Subject], Step]] = Registry("bench method")
"""The methods by name, in the order in which they are shown."""

BASELINE = "dropout"
"""The method that all others are compared with."""


def _steps(subject: Subject, objective: Objective) -> Step:
    def step() -> None:
        objective(subject.model, subject.inputs, subject.targets).backward()

    return step


@METHODS.register("none")
def none(subject: Subject) -> Step:
    """The loss alone."""
    return _steps(subject, NoRegularization(loss=subject.loss))


@METHODS.register("dropout")
def dropout(subject: Subject) -> Step:
    """The baseline: a hand-written step on PyTorch's own best path, without undrop."""
    return lambda: subject.plain().backward()


@METHODS.register("drop8")
def drop8(subject: Subject) -> Step:
    """Drop_8, the mean over eight masks."""
    return _steps(subject, Dropout(k=8, loss=subject.loss))


@METHODS.register("reverse-explicit")
def reverse_explicit(subject: Subject) -> Step:
    """The explicit part by the reverse engine."""
    return _steps(subject, Analytic(engine="reverse", implicit=False, **subject.batched))


@METHODS.register("reverse-both")
def reverse_both(subject: Subject) -> Step:
    """Both parts by the reverse engine."""
    return _steps(subject, Analytic(engine="reverse", **subject.batched))


@METHODS.register("tangent-both")
def tangent_both(subject: Subject) -> Step:
    """Both parts by the tangent engine."""
    return _steps(subject, Analytic(engine="tangent", **subject.batched))


@METHODS.register("antithetic-both")
def antithetic_both(subject: Subject) -> Step:
    """Both parts by the antithetic engine."""
    return _steps(subject, Analytic(engine="antithetic", **subject.batched))


@METHODS.register("antithetic-both-quarter")
def antithetic_both_quarter(subject: Subject) -> Step:
    """Both parts by the antithetic engine, with noise in a quarter of the batch."""
    return _steps(subject, Analytic(engine="antithetic", fraction=0.25, **subject.batched))


@METHODS.register("antithetic-both-eighth")
def antithetic_both_eighth(subject: Subject) -> Step:
    """Both parts by the antithetic engine, with noise in an eighth of the batch."""
    return _steps(subject, Analytic(engine="antithetic", fraction=0.125, **subject.batched))
