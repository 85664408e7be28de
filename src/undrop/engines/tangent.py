"""Forward mode in the scalar ε, then one reverse pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor
from torch.utils._pytree import tree_map

from undrop.engines.base import Engine, Evaluation, Request, weighted_parts
from undrop.engines.draw import Draw
from undrop.engines.fraction import Carried
from undrop.engines.proven import blocking_op
from undrop.engines.rules import TANGENT_RULES
from undrop.errors import EngineError
from undrop.sites import Interception, Site

__all__ = ["Tangent"]


class Tangent(Engine):
    """u = ∂F/∂ε by forward mode, at the cost of one more pass.

    Every op that the tangent goes through must be on the list of proven ones (``proven.py``) or have
    a rule of ours (``rules.py``): torch has ops whose gradient through a tangent is silently wrong.
    """

    name = "tangent"

    def evaluate(self, request: Request) -> Evaluation:
        """The weighted total ``c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε``, ready for one reverse pass."""
        blocked = blocking_op(request.model, request.inputs)
        if blocked is not None:
            raise EngineError(
                f"the tangent engine has no proven rule for {blocked}: use engine='antithetic', which "
                "needs none."
            )
        carried = Carried(request)
        run = replace(request, inputs=carried.inputs, targets=carried.targets)
        with forward.dual_level():
            with Interception(request.model, TangentField(request.draw), TANGENT_RULES):
                dual_output, dual = run.run()
            logits, u = _unpacked(dual)
            output = tree_map(_primal, dual_output)
        if carried.whole:
            total, parts = request.loss.combined(
                logits, u, request.targets, request.form, request.weights
            )
        else:
            total, parts = carried.combined(
                request, carried.first(logits), carried.first(u), carried.rest(logits)
            )
        output = carried.restore(output)
        return Evaluation(total, weighted_parts(request.weights, *parts), output)


class TangentField:
    """The field h ⊙ (1 + ε·σ·η) with ε = 0 and its tangent 1: h stays, ḣ becomes ḣ + σ·η⊙h."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """The dual number h, ḣ + σ·η⊙h."""
        noise = self.draw.scaled(site, h)
        if noise is None:
            return h
        primal, tangent = forward.unpack_dual(h)
        moved = primal * noise if tangent is None else torch.addcmul(tangent, primal, noise)
        dual: Tensor = forward.make_dual(primal, moved)
        return dual


def _unpacked(dual: Tensor) -> tuple[Tensor, Tensor]:
    primal, tangent = forward.unpack_dual(dual)
    return primal, torch.zeros_like(primal) if tangent is None else tangent


def _primal(x: Any) -> Any:
    return forward.unpack_dual(x).primal if isinstance(x, Tensor) and x.is_floating_point() else x
