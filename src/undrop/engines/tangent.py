"""Forward mode in the scalar ε, then one reverse pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

from undrop.engines.base import Engine, Evaluation, Request, weighted_parts
from undrop.engines.fraction import Carried
from undrop.engines.proven import first_unproven_op
from undrop.engines.rules import TANGENT_RULES, TangentField, unpacked
from undrop.errors import EngineError
from undrop.intercept import Interception, Site, map_tensors

__all__ = ["Tangent"]

_TURN = RLock()


class Tangent(Engine):
    """u = ∂F/∂ε by forward mode, at the cost of one more pass.

    Every op that the tangent goes through must be on the list of proven ones (``proven.py``) or have
    a rule of ours (``rules.py``): torch has ops whose gradient through a tangent is silently wrong.
    """

    name = "tangent"

    def evaluate(self, request: Request) -> Evaluation:
        """The weighted total ``c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε``, ready for one reverse pass."""
        _check_proof(request)
        carried = Carried(request)
        run = replace(request, inputs=carried.inputs, targets=carried.targets)
        with _forward_mode():
            field = TangentField(request.draw, carried.batch, carried.rows, carried.dim)
            with Interception(request.model, field, TANGENT_RULES) as mode:
                dual_output, dual = run.run()
            logits, tangent = unpacked(dual)
            u = torch.zeros_like(logits) if tangent is None else tangent
            output = map_tensors(_primal, dual_output)
        _check_proof(request, mode.sites)
        if carried.whole:
            total, parts = request.loss.combined(
                logits, u, request.targets, request.form, request.weights
            )
        else:
            total, parts = carried.combined(
                request, carried.first(logits), carried.first(u), carried.beside(logits)
            )
        output = carried.restore(output)
        return Evaluation(total, weighted_parts(request.weights, *parts), output)


def _check_proof(request: Request, met: Iterable[Site] = ()) -> None:
    blocked = first_unproven_op(request.model, request.inputs, met)
    if blocked is not None:
        raise EngineError(
            f"the tangent engine has no proven rule for {blocked}: use engine='antithetic', which "
            "needs none."
        )


@contextmanager
def _forward_mode() -> Iterator[None]:
    """Forward mode, which torch has only one of for all threads: they take turns."""
    with _TURN:
        if forward._current_level >= 0:
            raise EngineError(
                "forward mode is in use around this objective, and torch has no second one: use "
                "engine='antithetic'."
            )
        with forward.dual_level():
            yield


def _primal(x: Tensor) -> Tensor:
    return unpacked(x)[0] if x.is_floating_point() else x
