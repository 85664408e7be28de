"""The fastest engine that is correct for a model."""

from __future__ import annotations

import logging
import weakref

from torch import nn

from undrop.engines.antithetic import Antithetic
from undrop.engines.base import ENGINES, Engine, Evaluation, Request
from undrop.engines.proven import first_unproven_op
from undrop.engines.proving import NO_DROPOUT
from undrop.engines.tangent import Tangent
from undrop.errors import EngineError

_log = logging.getLogger("undrop")
_chosen: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]] = weakref.WeakKeyDictionary()
"""For each model, why one stacked pass is not correct, and the engine to use instead."""


@ENGINES.register("auto")
class Auto(Engine):
    """One stacked pass if examples are independent, else the tangent engine if possible.

    If examples interact, or with batch norm in half precision, a stacked pass is not correct, and two
    passes have a biased gradient. ``Auto`` then uses the tangent engine if every op has a proven rule,
    and two passes otherwise.
    """

    name = "auto"

    def __init__(self) -> None:
        self._tangent, self._antithetic = Tangent(), Antithetic()

    def evaluate(self, request: Request) -> Evaluation:
        """Return the evaluation of the engine that is chosen for this model."""
        engine = self.choose(request)
        try:
            return engine.evaluate(request)
        except EngineError:
            if engine is self._antithetic:
                raise
            return self._antithetic.evaluate(
                request
            )  # the model took a branch without proven rules

    def choose(self, request: Request) -> Engine:
        """Return the engine for this model, and log the reason when it changes."""
        model = request.batch.model
        plan, reason = self._antithetic.plan(request)
        if plan is not None and not (request.half_precision and _has_batch_norm(model)):
            return self._antithetic
        if request.fraction < 1.0 or reason == NO_DROPOUT:
            return self._antithetic  # it raises an error with the reason
        reason = reason or "half precision with batch norm needs more digits than ±ε₀ leaves"
        known = _chosen.get(model)
        if known is None or known[0] != reason:
            unproven = first_unproven_op(model, request.batch.inputs)
            name = self._antithetic.name if unproven else self._tangent.name
            _chosen[model] = known = (reason, name)
            if not unproven:
                _log.warning(
                    "undrop uses the tangent engine for %s, since %s.", type(model).__name__, reason
                )
        return self._tangent if known[1] == self._tangent.name else self._antithetic


def _has_batch_norm(model: nn.Module) -> bool:
    kind = nn.modules.batchnorm._BatchNorm
    return any(isinstance(m, kind) and m.training for m in model.modules())
