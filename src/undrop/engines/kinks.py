"""Measure once per model whether a kink without a rule biases the gradient.

The rules in ``midpoint.py`` choose the branch at the midpoint of both signs. A function without a rule
(a custom kernel, TorchScript, a function that is new in torch) chooses a branch for each sign, and a
unit whose branches differ adds O(1/ε₀) to the gradient of u. With a smaller ε₀, the gradient of a
smooth function stays the same up to O(ε₀²), and the gradient of a function with a kink does not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from undrop.autodiff import gradients
from undrop.engines.base import Evaluation, Request
from undrop.engines.plan import NotStackable, PlanChanged
from undrop.intercept import is_sharded, preserve_model, tensors_in
from undrop.losses import Coefficients

_log = logging.getLogger("undrop")
_LIMIT = 0.1  # the largest relative change that a smooth model shows
_measured: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def measure_kinks(request: Request, run: Callable[..., tuple[Evaluation, int]]) -> None:
    """Compare the gradient of the regularizers at ε₀ and ε₀/8, and log a warning if they differ.

    ``run(request, factor=…)`` evaluates a request with ε₀ times a factor.
    """
    model, c = request.batch.model, request.coefficients
    if model in _measured or is_sharded(model) or request.half_precision:
        return
    _measured.add(model)
    batch = request.batch._replace(backend=None)
    device = next((t.device for t in tensors_in(batch.inputs)), torch.device("cpu"))
    generator = request.draw.generator(device)
    state, weights = generator.get_state(), [p for p in model.parameters() if p.requires_grad]

    def gradient(coefficients: Coefficients, factor: float) -> Tensor:
        generator.set_state(state)
        part = replace(request, batch=batch, coefficients=coefficients)
        with preserve_model(model), request.loss.keep_state():
            found = gradients(run(part, factor=factor)[0].total, weights)
        return torch.cat([g.flatten() for g in found]) if found else torch.zeros(1)

    regularizers = Coefficients(0.0, c.quadratic, c.directional)
    try:
        wide, narrow = gradient(regularizers, 1.0), gradient(regularizers, 0.125)
        size = narrow.norm()
        change = float((wide - narrow).norm() / size) if size > 0 else 0.0
        if change > _LIMIT:  # may be only rounding, for example if dropout has no effect
            least = 1e4 * torch.finfo(size.dtype).eps * gradient(Coefficients(1.0, 0.0, 0.0), 1.0)
            change = change if size > least.norm() else 0.0
    except (PlanChanged, NotStackable):
        _measured.discard(model)  # a later step measures it, with the plan that fits
        raise
    finally:
        generator.set_state(state)
    if change > _LIMIT:
        _log.warning(
            "the gradient of the regularizers of %s changes by %.0f %% with a smaller ε₀: the model "
            "calls a function with a kink or a jump that undrop has no rule for. Use engine='tangent', "
            "or register a rule for it in undrop.engines.midpoint.MIDPOINT_RULES.",
            type(model).__name__,
            100 * change,
        )
