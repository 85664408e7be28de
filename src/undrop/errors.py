"""Every error that undrop raises on purpose: one sentence that names the thing and the way out."""

from __future__ import annotations


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


class SiteSelectionError(UndropError):
    """A pattern for choosing sites that matches none."""


class EngineError(UndropError):
    """The engine asked for can't differentiate this model or loss."""


class OptionError(UndropError, ValueError):
    """An argument outside its range."""
