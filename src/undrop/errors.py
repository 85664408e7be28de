"""Every error that undrop raises on purpose: one sentence that names the thing and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UndropError(Exception):
    """The base of all of undrop's own errors."""


class NoDropoutError(UndropError):
    """The model was run and no active dropout was met."""


class EvalModeError(UndropError):
    """The model is in eval mode, where its dropout is off."""


class UnsupportedDropoutError(UndropError):
    """A dropout that is not multiplicative zero-mean noise, or has p = 1."""


class GradientsDisabledError(UndropError):
    """An objective was called where no gradient can be had."""


class TargetError(UndropError):
    """Targets whose shape, type or range does not fit the model's output."""


class OutputError(UndropError):
    """A model output in which the tensor that the loss is to see can't be found."""


class NonFiniteError(UndropError):
    """A part of the objective came out infinite or NaN."""


class StepError(UndropError):
    """A step whose gradient was taken before."""


class SiteSelectionError(UndropError):
    """A pattern for choosing sites that matches none."""


class EngineError(UndropError):
    """The engine asked for can't differentiate this model or loss."""


class RecomputationError(EngineError):
    """Activation checkpointing of a kind whose second run can't be given the noise of the first."""


class TorchVersionError(UndropError, ImportError):
    """A torch that is older than undrop can work with."""


class OptionError(UndropError, ValueError):
    """An argument outside its range."""


class UnknownNameError(OptionError):
    """A name that nothing has: the nearest one and all there are.

    Args:
        kind: what the name was to name, e.g. ``"corpus"``.
        name: the name that was given.
        known: the names there are.
        hint: what may be given besides them, as the end of a sentence.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names = list(known)
        near = get_close_matches(name, names, n=1)
        guess = f"did you mean {near[0]!r}? There are" if near else "there are"
        super().__init__(f"unknown {kind} {name!r}: {guess} {', '.join(names)}{hint}.")


class MissingExtraError(UndropError, ImportError):
    """A part of undrop that needs a package which comes with an extra.

    Args:
        what: the part of undrop.
        package: the package that is not there.
        extra: the extra it comes with.
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}: pip install 'undrop[{extra}]'.")


class DataError(UndropError):
    """A corpus that can't be found, fetched, read or kept."""


class ConfigError(OptionError):
    """A setting of a training run that is unknown or outside its range."""


class RunError(UndropError):
    """A run's folder that can't be written, read, or is in use."""


class CheckpointError(RunError):
    """A checkpoint that was cut short or changed."""


class StoppedError(UndropError):
    """A run that was asked to stop: its state is saved."""
