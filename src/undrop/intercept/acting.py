"""Whose noise reaches the output: behind weights that are 0, as in a new LoRA adapter, none does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from undrop.errors import OutputError, UndropError
from undrop.intercept.interception import Interception
from undrop.intercept.model_call import call, logits_of
from undrop.intercept.pytrees import map_tensors, tensors_in
from undrop.intercept.site import Site
from undrop.intercept.wrappers import is_sharded
from undrop.rng_snapshot import seed_current


def acting(model: nn.Module, inputs: Any) -> dict[str, bool]:
    """Return, by the name of each site, whether u ≠ 0: the derivative of vᵀF for a random v.

    It is empty where the model can't be differentiated outside of its training: then nothing is known.
    """
    if is_sharded(model):
        return {}
    if isinstance(model, DistributedDataParallel):
        model = model.module  # a pass without its backward would confuse the wrapper
    leaves: dict[str, Tensor] = {}

    def action(site: Site, h: Tensor) -> Tensor:
        z = torch.zeros(site.mask_shape, dtype=h.dtype, device=h.device, requires_grad=True)
        leaves[site.name] = z
        return h * (1.0 + z)

    seed_current(0)
    try:
        with torch.enable_grad(), Interception(model, action):
            output = call(model, map_tensors(_copied, inputs))
        if not leaves:
            return {}
        outputs = _outputs(output)
        gradients = torch.autograd.grad(
            outputs,
            list(leaves.values()),
            [torch.randn_like(f) for f in outputs],
            allow_unused=True,
        )
    except (RuntimeError, UndropError):  # no memory, no derivative, reentrant checkpointing
        return {}
    found = zip(leaves, gradients, strict=True)
    return {name: g is not None and bool(g.any()) for name, g in found}


def _copied(x: Tensor) -> Tensor:
    """Return a copy: dropout in place would make the caller's tensor a part of the graph."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _outputs(output: Any) -> list[Tensor]:
    """Return the tensor that a loss sees, or all of them."""
    try:
        found = [logits_of(output)]
    except OutputError:
        found = list(tensors_in(output))
    return [f for f in found if f.is_floating_point() and f.requires_grad]
