"""Measure once per model whether a kink without a rule biases the gradient.

A rule in ``midpoint.py`` makes the rows at +ε₀ and -ε₀ take the same branch. A function without a rule
(a custom kernel, TorchScript, a function that is new in torch) may take two branches, which adds O(1/ε₀)
to the gradient of u. To find out, this module also computes the gradient with a smaller ε₀. For a smooth
function it then changes by O(ε₀²) only, and for a function with a kink by much more.
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
_TOO_LARGE = (
    "the model is far from linear over ±ε₀. Use engine='tangent', or a smaller ε₀ with "
    "engine=undrop.engines.Antithetic(epsilon=0.01)"
)
_KINK = (
    "the model calls a function with a kink or a jump that undrop has no rule for. Use "
    "engine='tangent', or register a rule for it in undrop.engines.midpoint.MIDPOINT_RULES"
)
_LIMIT = 0.1  # smooth models show a smaller relative change of the gradient
_measured: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def measure_kinks(request: Request, run: Callable[..., tuple[Evaluation, int]]) -> None:
    """Compare the gradients of the regularizers at ε₀ and ε₀/8, and log a warning if they differ.

    ``run(request, factor=…)`` evaluates a request with ``factor`` times ε₀.
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
            by_weight = gradients(run(part, factor=factor)[0].total, weights)
        return torch.cat([g.flatten() for g in by_weight]) if by_weight else torch.zeros(1)

    regularizers = Coefficients(0.0, c.quadratic, c.directional)
    try:
        full, eighth = gradient(regularizers, 1.0), gradient(regularizers, 0.125)
        size = eighth.norm()
        change = float((full - eighth).norm() / size) if size > 0 else 0.0
        smooth = False
        if change > _LIMIT:  # it may be only rounding, for example if dropout has no effect
            loss_gradient = gradient(Coefficients(1.0, 0.0, 0.0), 1.0)
            rounding = 1e4 * torch.finfo(size.dtype).eps * loss_gradient.norm()
            change = change if size > rounding else 0.0
            # O(ε₀²): half the ε₀ leaves (1/4 - 1/64)/(1 - 1/64) = 0.24 of the change. A kink that is
            # crossed at ε₀/2 leaves more than all of it, and one that is not leaves nothing.
            half = gradient(regularizers, 0.5)
            smooth = 0.1 < float((half - eighth).norm() / (full - eighth).norm()) < 0.4
    except (PlanChanged, NotStackable):
        _measured.discard(model)  # a later step measures again, with another plan
        raise
    finally:
        generator.set_state(state)
    if change > _LIMIT:
        _log.warning(
            "the gradient of the regularizers of %s changes by %.0f %% with a smaller ε₀: %s.",
            type(model).__name__,
            100 * change,
            _TOO_LARGE if smooth else _KINK,
        )
