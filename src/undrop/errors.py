"""The errors that undrop raises: each message is one sentence that names the problem and the way out.

All errors are subclasses of ``UndropError``, so ``except undrop.errors.UndropError`` catches them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UndropError(Exception):
    """The base of all of undrop's own errors."""


class NoDropoutError(UndropError):
    """The model ran and used no active dropout."""


class EvalModeError(UndropError):
    """The model is in eval mode, where its dropout is off."""


class UnsupportedDropoutError(UndropError):
    """A dropout that is not multiplicative zero-mean noise, or has p = 1."""


class GradientsDisabledError(UndropError):
    """An objective was called where gradients are disabled."""


class TargetError(UndropError):
    """Targets whose shape, type or range does not fit the model's output."""


class OutputError(UndropError):
    """A model output without a tensor that the loss can use."""


class NonFiniteError(UndropError):
    """A part of the objective is infinite or NaN."""


class StepError(UndropError):
    """A second ``backward()`` on the same step."""


class SiteSelectionError(UndropError):
    """A pattern that matches no site."""


class EngineError(UndropError):
    """The requested engine can't differentiate this model or loss."""


class RecomputationError(EngineError):
    """Activation checkpointing whose recomputation can't repeat the noise of the first run."""


class TorchVersionError(UndropError, ImportError):
    """A version of torch that is too old."""


class OptionError(UndropError, ValueError):
    """An argument outside its range."""


class UnknownNameError(OptionError):
    """An unknown name: the error suggests the nearest one and lists all.

    Args:
        kind: what the name stands for, e.g. ``"corpus"``.
        name: the unknown name.
        known: the existing names.
        hint: other accepted values, as the end of the sentence.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names = list(known)
        near = get_close_matches(name, names, n=1)
        guess = f"did you mean {near[0]!r}? There are" if near else "there are"
        super().__init__(f"unknown {kind} {name!r}: {guess} {', '.join(names) or 'none'}{hint}.")


class MissingExtraError(UndropError, ImportError):
    """A missing optional dependency.

    Args:
        what: the part of undrop that needs the package.
        package: the missing package.
        extra: the extra of undrop that installs it.
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}: pip install 'undrop[{extra}]'.")


class DataError(UndropError):
    """Data that can't be found, downloaded, read or stored."""


class ConfigError(OptionError):
    """A setting of a training run that is unknown or outside its range."""


class RunError(UndropError):
    """A file or folder that can't be written or read, or a run's folder that is in use."""


class CheckpointError(RunError):
    """A checkpoint that is missing, truncated or modified."""


class StoppedError(UndropError):
    """A run that was asked to stop: its state is saved."""
