"""The fastest engine that is correct for a model."""

from __future__ import annotations

import logging
import weakref

from torch import nn

from undrop.engines.antithetic import Antithetic
from undrop.engines.base import ENGINES, Evaluation, Request
from undrop.engines.plan import Plan
from undrop.engines.proven import first_unproven_op
from undrop.engines.proving import NO_DROPOUT
from undrop.engines.tangent import Tangent
from undrop.errors import EngineError

_log = logging.getLogger("undrop")


@ENGINES.register("auto")
class Auto(Antithetic):
    """One stacked pass if examples are independent, else the tangent engine if possible.

    If examples interact, or with batch norm in half precision, a stacked pass is not correct, and two
    passes have a biased gradient. ``Auto`` then uses the tangent engine if every op has a proven rule,
    and two passes otherwise.
    """

    name = "auto"

    def plan(self, request: Request, again: bool = False) -> tuple[Plan | None, str]:
        """Return the plan for a stacked pass, or None and the reason why there is none."""
        plan, reason = super().plan(request, again)
        half = request.half_precision or (plan is not None and plan.half_precision)
        if plan is not None and half and _has_batch_norm(request.batch.model):
            return None, "half precision with batch norm needs more digits than ±ε₀ leaves"
        return plan, reason

    def without_plan(self, request: Request, reason: str) -> Evaluation:
        """Evaluate a request that has no plan: by the tangent engine if it can, else in two passes."""
        if request.fraction == 1.0 and reason != NO_DROPOUT and _tangent_fits(request, reason):
            try:
                return Tangent().evaluate(request)
            except EngineError:
                pass  # the model took a branch with an unproven op
        return super().without_plan(request, reason)


_fits: weakref.WeakKeyDictionary[nn.Module, tuple[str, bool]] = weakref.WeakKeyDictionary()
"""For each model, the reason why it has no plan, and whether the tangent engine fits."""


def _tangent_fits(request: Request, reason: str) -> bool:
    """Return whether every op has a proven rule; computed and logged again when the reason changes."""
    model = request.batch.model
    if _fits.get(model, ("", False))[0] != reason:
        fits = first_unproven_op(model, request.batch.inputs) is None
        _fits[model] = (reason, fits)
        if fits:
            _log.warning(
                "undrop uses the tangent engine for %s, since %s.", type(model).__name__, reason
            )
    return _fits[model][1]


def _has_batch_norm(model: nn.Module) -> bool:
    kind = nn.modules.batchnorm._BatchNorm
    return any(isinstance(m, kind) and m.training for m in model.modules())
