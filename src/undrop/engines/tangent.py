"""Forward mode in ε, then one reverse pass: the reference engine, which has no ε₀."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor, nn

from undrop.engines.base import ENGINES, Engine, Evaluation, Request, refuse_fraction
from undrop.engines.draw import Draw
from undrop.engines.proven import first_unproven_op
from undrop.engines.tangent_rules import TANGENT_RULES, packed, unpacked
from undrop.errors import EngineError, RecomputationError
from undrop.intercept import Interception, Site, map_tensors
from undrop.intercept.checkpointing import in_checkpoint

_FORWARD_MODE = RLock()


@ENGINES.register("tangent")
class Tangent(Engine):
    """u = ∂F/∂ε by forward mode.

    Some of torch's gradients through a tangent are silently wrong. Therefore every op that the tangent
    reaches must be proven (``proven.py``) or have a rule (``tangent_rules.py``).
    """

    name = "tangent"

    def evaluate(self, request: Request) -> Evaluation:
        """Return c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε with a graph, and its parts."""
        refuse_fraction(self, request)
        if request.batch.model not in _proven:
            _check_proof(request, 0)  # before the first pass, which has no trail yet
        with _forward_mode():
            with Interception(request.batch.model, DualNoise(request.draw), TANGENT_RULES) as mode:
                dual_output, dual_f = _run(request)
            f, u = map_tensors(_primal, dual_f), map_tensors(_tangent, dual_f)
            output = map_tensors(_primal, dual_output)
        _check_proof(request, hash((mode.trail, *(site.name for site in mode.sites))))
        return request.evaluation(f, u, lambda: output, self.name)


def _run(request: Request) -> tuple[Any, Any]:
    """Run the model; if a part of it has no forward mode, raise an error that says so."""
    try:
        return request.run()
    except NotImplementedError as error:
        name, reason = type(request.batch.model).__name__, str(error).strip().split("\n")[0]
        if in_checkpoint(error):  # torch 2.8 notices it before the interception does
            raise RecomputationError(
                f"a part of {name} is under activation checkpointing, whose second run has no "
                "forward mode: use engine='antithetic'."
            ) from error
        raise EngineError(
            f"a part of {name} has no forward mode: use engine='antithetic' (torch says: {reason})"
        ) from error


class DualNoise:
    """The site action h ⊙ (1 + ε·σ·η) at ε = 0, where ε has the tangent 1: it adds σ·η⊙h to ḣ."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __call__(self, site: Site, h: Tensor) -> Tensor:
        """Return the dual number (h, ḣ + σ·η⊙h)."""
        noise = self.draw.sigma_eta(site, h)
        if noise is None:
            return h
        primal, tangent = unpacked(h)
        new_tangent = primal * noise if tangent is None else torch.addcmul(tangent, primal, noise)
        # A copy, because the model may change the result in place and then use h again.
        return packed(primal.clone(), new_tangent)


_proven: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()


def _check_proof(request: Request, trail: int) -> None:
    """Check the ops of a model once for each new trail; raise an ``EngineError`` for an unproven op."""
    model = request.batch.model
    if trail in _proven.get(model, ()):
        return
    unproven = first_unproven_op(model, request.batch.inputs)
    if unproven is not None:
        raise EngineError(
            f"the tangent engine has no proven rule for {unproven}: use engine='antithetic', which "
            "needs none."
        )
    _proven.setdefault(model, set()).add(trail)


@contextmanager
def _forward_mode() -> Iterator[None]:
    """Enter forward mode. Torch has only one for all threads, so threads wait for each other."""
    with _FORWARD_MODE:
        if forward._current_level >= 0:
            raise EngineError(
                "this objective is called inside forward mode, which torch can't nest: use "
                "engine='antithetic'."
            )
        with forward.dual_level():
            yield


def _tangent(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    primal, tangent = unpacked(x)
    return torch.zeros_like(primal) if tangent is None else tangent


def _primal(x: Tensor) -> Tensor:
    return unpacked(x)[0] if x.is_floating_point() else x
