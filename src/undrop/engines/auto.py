"""The tangent engine where it can be trusted, the antithetic one elsewhere."""

from __future__ import annotations

import logging
import weakref

from torch import nn

from undrop.engines.antithetic import Antithetic
from undrop.engines.base import Engine, Evaluation, Request
from undrop.engines.proven import blocking_op
from undrop.engines.tangent import Tangent

__all__ = ["Auto"]

_log = logging.getLogger("undrop")


class Auto(Engine):
    """Decides once per model, and says in one line of the log why if it is not the tangent."""

    name = "auto"

    def __init__(self) -> None:
        self._chosen: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()

    def evaluate(self, request: Request) -> Evaluation:
        """What the engine chosen for this model answers."""
        return self.choose(request).evaluate(request)

    def choose(self, request: Request) -> Engine:
        """The engine for this model."""
        model = request.model
        if model not in self._chosen:
            blocked = blocking_op(model, request.inputs)
            if blocked is not None:
                _log.warning(
                    "undrop uses the antithetic engine for %s: the tangent engine has no proven rule "
                    "for %s.",
                    type(model).__name__,
                    blocked,
                )
            self._chosen[model] = Tangent() if blocked is None else Antithetic()
        return self._chosen[model]
