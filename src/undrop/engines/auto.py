"""The tangent engine where it can be trusted, the antithetic one elsewhere."""

from __future__ import annotations

import logging
import weakref

from torch import nn

from undrop.engines.antithetic import Antithetic
from undrop.engines.base import Engine, Evaluation, Request
from undrop.engines.proven import first_unproven_op
from undrop.engines.tangent import Tangent
from undrop.errors import EngineError

__all__ = ["Auto"]

_log = logging.getLogger("undrop")


class Auto(Engine):
    """Decides by model, and says in one line of the log why if it is not the tangent."""

    name = "auto"

    def __init__(self) -> None:
        self._tangent, self._antithetic = Tangent(), Antithetic()
        self._said: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def evaluate(self, request: Request) -> Evaluation:
        """What the engine chosen for this model answers."""
        engine = self.choose(request)
        try:
            return engine.evaluate(request)
        except EngineError:
            other = self.choose(request)
            if other is engine:
                raise
            return other.evaluate(request)  # the pass met a dropout that was not active before

    def choose(self, request: Request) -> Engine:
        """The engine for this model, by what is known of it so far."""
        model = request.model
        blocked = first_unproven_op(model, request.inputs)
        if blocked is None:
            return self._tangent
        if self._said.get(model) != blocked:
            self._said[model] = blocked
            _log.warning(
                "undrop uses the antithetic engine for %s: the tangent engine has no proven rule "
                "for %s.",
                type(model).__name__,
                blocked,
            )
        return self._antithetic
