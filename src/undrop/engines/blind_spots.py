"""A pass to differentiate twice, and one log line if reverse mode misses a part of the noise."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from undrop.engines.base import (
    Engine,
    Request,
    refuse_fraction,
    refuse_sharded,
    refuse_whole_output,
)
from undrop.engines.double_backward import TWICE_DIFFERENTIABLE
from undrop.engines.draw import Draw, ScaledNoise, ZeroLeaves
from undrop.generators import Generators
from undrop.intercept import Interception, RngSnapshot, keep_buffers

_log = logging.getLogger("undrop")
_looked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_STEP = {torch.float64: 1e-5, torch.float32: 1e-2}
"""ε, before it is divided by the largest σ."""
_SHARE = {torch.float64: 0.01, torch.float32: 0.2}
"""A difference that rounding and kinks do not make."""


def pass_to_differentiate(engine: Engine, request: Request) -> tuple[Any, Tensor, ZeroLeaves]:
    """Run the model with a zero leaf at every site: all it returns, what the loss sees, the leaves.

    Raises:
        EngineError: for what an engine that differentiates twice can't do.
    """
    refuse_sharded(engine, request.batch.model)
    refuse_fraction(engine, request)
    refuse_whole_output(engine, request)
    look_for_blind_spots(request, engine.name)
    action = ZeroLeaves(request.draw)
    with Interception(request.batch.model, action, TWICE_DIFFERENTIABLE):
        output, seen = request.run()
    return output, seen, action


def look_for_blind_spots(request: Request, engine: str) -> None:
    """Compare Σ_j σ_j η_j ∂ℓ/∂z_j with (ℓ(ε) - ℓ(-ε))/2ε once for each model, and log if they differ.

    They differ behind ``detach()``, ``torch.no_grad()``, a gradient hook, and an autograd function whose
    backward is not its derivative.
    """
    model = request.batch.model
    if model in _looked or request.loss.counts_calls or not _is_precise(model):
        return
    _looked.add(model)
    with torch.enable_grad():
        backward, forward, tolerance = _derivatives(request)
    if abs(backward - forward) > tolerance:
        _log.warning(
            "the %s engine misses a part of what dropout does in %s: along one draw of the noise the "
            "loss changes at a rate of %.3g, and reverse mode says %.3g. Look for detach(), no_grad(), "
            "a gradient hook or an autograd function of your own, or use engine='auto'.",
            engine,
            type(model).__name__,
            forward,
            backward,
        )


def _derivatives(request: Request) -> tuple[float, float, float]:
    """Return ∂ℓ/∂ε by reverse mode and by differences, and by how much they may differ."""
    model = request.batch.model
    if isinstance(model, DistributedDataParallel):
        model = model.module  # DDP waits for the backward pass of every forward pass
    rng = RngSnapshot(model)
    draw = Draw("sign", request.draw.mask, request.draw.selection, Generators())
    request = replace(request, batch=request.batch._replace(model=model), draw=draw)

    def loss_under(mode: Interception) -> Tensor:
        rng.restart()
        with keep_buffers(model), mode:
            _, logits = request.run()
        return request.loss.value(logits, request.batch.targets)

    zeros = ZeroLeaves(draw)
    loss = loss_under(Interception(model, zeros, TWICE_DIFFERENTIABLE))
    if not zeros.leaves or loss.dtype not in _STEP:
        return 0.0, 0.0, 0.0  # no site is chosen, or half precision
    gradients = torch.autograd.grad(loss, zeros.leaves, allow_unused=True, materialize_grads=True)
    parts = []
    for site, leaf, gradient in zip(zeros.sites, zeros.leaves, gradients, strict=True):
        noise = draw.sigma_eta(site, leaf)
        if noise is not None:
            parts.append((gradient * noise).double().flatten())
    changes = torch.cat(parts)
    wide = max(1.0, *(draw.scale(site) for site in zeros.sites))
    step = _STEP[loss.dtype] / wide
    with torch.no_grad():
        up, down = (
            float(loss_under(Interception(model, ScaledNoise(draw, e)))) for e in (step, -step)
        )
    rng.restart()
    forward = (up - down) / (2 * step)
    rounding = 100 * torch.finfo(loss.dtype).eps * abs(float(loss.detach())) / step
    size = max(float(changes.norm()), abs(forward))  # the sum over signs may cancel
    return float(changes.sum()), forward, _SHARE[loss.dtype] * size + rounding


def _is_precise(model: nn.Module) -> bool:
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    if weight is None or weight.dtype not in (torch.float32, torch.float64):
        return False
    return not torch.is_autocast_enabled(weight.device.type)
