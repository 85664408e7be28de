"""Run the model at ±ε₀ with the same η: in one stacked pass, or in two passes if examples interact."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from undrop.engines.base import ENGINES, Engine, Evaluation, Request, WeightedParts
from undrop.engines.compiled import compiled_pass
from undrop.engines.draw import ScaledNoise
from undrop.engines.kinks import measure_kinks
from undrop.engines.layout import Rows
from undrop.engines.plan import NotStackable, Plan, PlanChanged, map_dims, stacked_noise
from undrop.engines.proving import NO_DROPOUT
from undrop.engines.stacked import run_stacked
from undrop.engines.stacking import StateBeforeStep, find_plan, plan_is_right
from undrop.errors import EngineError, OptionError
from undrop.intercept import Interception, RngSnapshot, keep_buffers, map_tensors
from undrop.losses import Coefficients

_log = logging.getLogger("undrop")

EPSILON = 0.05
"""ε₀ for float32 and float64. The gradient's relative error is below 1e-3 in the models of
``benchmarks/epsilon.py``, and 3e-3 in a small net with batch norm."""
EPSILON_HALF = 0.25
"""ε₀ for half precision: the best compromise between rounding and truncation, with an error of 2 to 3 %.
``benchmarks/epsilon.py`` measures it, and docs/engines.md shows the curves."""


@ENGINES.register("antithetic")
class Antithetic(Engine):
    """u ≈ (F₊ - F₋)/2ε₀ and F ≈ (F₊ + F₋)/2, each up to O(ε₀²), with one backward pass.

    Args:
        epsilon: ε₀; None chooses it by the precision. A larger ε₀ means a larger truncation error and a
            smaller rounding error. If the largest σ of the model is above 1, ε₀ is divided by it.
    """

    name = "antithetic"

    def __init__(self, epsilon: float | None = None) -> None:
        if epsilon is not None and not 0.0 < epsilon <= 1.0:
            raise OptionError(f"epsilon must lie in (0, 1], got {epsilon}.")
        self.epsilon = epsilon

    def evaluate(self, request: Request) -> Evaluation:
        """Return c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε, ready for one reverse pass."""
        before: StateBeforeStep | None = None
        for again in (False, True):
            plan, reason = self.plan(request, again)
            if plan is None:
                return self.without_plan(request, reason)
            before = before or StateBeforeStep(request.batch.model)
            try:
                if not (again or request.loss.has_side_effects or plan.half_precision):
                    # before the graph takes memory
                    measure_kinks(request, partial(self._one_pass, plan=plan))
                evaluation, trail = self._one_pass(request, plan)
                if plan_is_right(request, trail, before.rng) or again:
                    return evaluation
            except (PlanChanged, NotStackable):
                pass
            except (RuntimeError, IndexError, ValueError) as error:
                if again:
                    raise
                _log.info("undrop searches for another stacked pass: %r", error)
            before.restore()  # the plan does not fit this step: search for another one, once
        return self.without_plan(request, "a stacked pass reaches different sites")

    def plan(self, request: Request, again: bool = False) -> tuple[Plan | None, str]:
        """Return the plan for a stacked pass, or None and the reason why there is none."""
        plan, reason = find_plan(request, again=again)
        if plan is not None and request.loss.whole_output and None in plan.output_dims:
            return None, "the loss receives an output without a batch dimension"
        return plan, reason

    def _one_pass(
        self, request: Request, plan: Plan, factor: float = 1.0
    ) -> tuple[Evaluation, int]:
        """Run the model once on [without noise; +ε₀; -ε₀]; return the evaluation and the trail.

        ε₀ is multiplied by ``factor``.
        """
        batch, draw = request.batch, request.draw
        layout = request.layout(plan.dim, shared=plan.shares_noise)
        rows = Rows.draw(layout, draw.generator(plan.sites[0].device))
        sigmas = [draw.scale(s.site) for s in plan.sites]
        half = request.half_precision or plan.half_precision
        epsilon = self._epsilon(half, max(sigmas)) * factor
        noise = stacked_noise(plan, draw, rows, [epsilon * sigma for sigma in sigmas])
        inputs = batch.inputs
        if not plan.at_first_site:
            inputs = map_dims(rows.stack, inputs, plan.input_dims)
        run: Callable[..., Any] = run_stacked
        if batch.backend is not None and not plan.reads_filled_tensor:  # a compiled model
            run = compiled_pass(batch.model, batch.backend)
        stacked, trail = run(batch.model, plan, layout, rows.index, noise, inputs)
        total, parts = _stacked_total(request, plan, rows, stacked, 0.5 / epsilon)

        def output() -> Any:
            noise_free = map_dims(rows.noise_free, stacked, plan.output_dims)
            return map_dims(rows.in_batch_order, noise_free, plan.output_dims)

        return Evaluation(total, parts, output, "antithetic: one stacked pass"), trail

    def without_plan(self, request: Request, reason: str) -> Evaluation:
        """Evaluate a request that has no plan: run the model at +ε₀, and again at -ε₀."""
        batch, draw = request.batch, request.draw
        if reason == NO_DROPOUT:
            raise request.no_dropout_error()
        if request.fraction < 1.0 or request.exact_output:
            option, remedy = "fraction < 1", "fraction=1"
            if request.fraction == 1.0:
                option, remedy = "exact_output", "engine='tangent'"
            raise EngineError(
                f"{option} needs independent examples, but in {type(batch.model).__name__} {reason}: "
                f"use {remedy}."
            )
        _warn_once(batch.model, reason)
        rng = RngSnapshot.after_seeding(batch.model, draw.generator)

        def run(epsilon: float) -> tuple[Any, Any]:
            if rng.changed_generators():
                rng.restore()
            with Interception(batch.model, ScaledNoise(draw, epsilon)):
                return request.run()

        sigma, half = _largest_sigma.get(batch.model, 1.0), request.half_precision
        while True:
            epsilon = self._epsilon(half, sigma)
            with keep_buffers(batch.model):
                out_minus, f_minus = run(-epsilon)
            if draw.largest_sigma <= sigma and draw.half_precision <= half:
                break
            # repeat with the ε₀ for this σ and precision
            sigma, half = max(sigma, draw.largest_sigma), half or draw.half_precision
        _largest_sigma[batch.model] = max(1.0, draw.largest_sigma)
        out_plus, f_plus = run(epsilon)
        f = map_tensors(midpoint, f_plus, f_minus)
        u = map_tensors(lambda plus, minus: (plus - minus) * (0.5 / epsilon), f_plus, f_minus)
        engine = f"antithetic: two passes, since {reason}"
        return request.evaluation(f, u, lambda: map_tensors(midpoint, out_plus, out_minus), engine)

    def _epsilon(self, half: bool, sigma: float) -> float:
        """Return ε₀ for half or full precision, and for the largest σ."""
        default = EPSILON_HALF if half else EPSILON
        return (default if self.epsilon is None else self.epsilon) / max(1.0, sigma)


def _loss_arguments(
    request: Request, plan: Plan, rows: Rows, stacked: Any, scale: float
) -> tuple[Any, Any, Any]:
    """Return F, u and the targets in an order that the loss accepts.

    Usually the examples with noise come last, and u contains only these. If the loss depends on the
    order of the examples (weights in a closure, neighbors), all three are in the order of the batch,
    with u = 0 for examples without noise.
    """
    loss, targets = request.loss, request.batch.targets
    dims = plan.output_dims if loss.whole_output else (plan.logits_dim,)

    def tangent(x: Tensor, dim: int) -> Tensor:
        return rows.output_and_tangent(x, dim, scale)[1] if x.is_floating_point() else x

    selected = loss.select(stacked)
    if isinstance(selected, Tensor):
        f, u = rows.output_and_tangent(selected, dims[0] or 0, scale)
    else:
        f, u = map_dims(rows.noise_free, selected, dims), map_dims(tangent, selected, dims)
    if loss.in_any_order:
        return f, u, map_dims(rows.noisy_last, targets, plan.target_dims)
    return map_dims(rows.in_batch_order, f, dims), map_dims(rows.with_zeros, u, dims), targets


def _stacked_total(
    request: Request, plan: Plan, rows: Rows, stacked: Any, scale: float
) -> tuple[Tensor, WeightedParts]:
    """Return c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε of a stacked output, and its parts.

    u is ``scale``·(x₊ - x₋), and 0 for the examples without noise.

    The explicit part is divided by ρ, which keeps its mean over the random choice of examples. The
    implicit part is divided by sqrt(ρ), which keeps its covariance if the noise of different examples
    is independent.
    """
    loss, c, rho = request.loss, request.coefficients, rows.layout.noisy / rows.layout.batch
    c = Coefficients(c.loss, c.quadratic / rho, c.directional / math.sqrt(rho))
    if loss.computes_gradients:
        closed_form = _with_closed_form(request, plan, rows, stacked, scale, c)
        if closed_form is not None:
            return closed_form
    f, u, targets = _loss_arguments(request, plan, rows, stacked, scale)
    loss.check(f, targets)
    total, parts = loss.combined(f, u, targets, request.form, c, dim=plan.logits_dim)
    return total, WeightedParts(c, parts)


def _with_closed_form(
    request: Request, plan: Plan, rows: Rows, stacked: Any, scale: float, c: Coefficients
) -> tuple[Tensor, WeightedParts] | None:
    """Return the total as a single autograd node, and its parts; None without a closed-form gradient."""
    x = request.loss.select(stacked)
    targets = map_dims(rows.noisy_last, request.batch.targets, plan.target_dims)
    dim = plan.logits_dim

    with torch.no_grad():
        f, u = rows.output_and_tangent(x, dim, scale)
        request.loss.check(f, targets)
        result = request.loss.total_and_gradients(f, u, targets, request.form, c, dim=dim)
        if result is None:
            return None
        gradient = rows.stacked_gradient(x, result.output_gradient, result.u_gradient, dim, scale)
    return _WithGradient.apply(x, result.total, gradient), WeightedParts(c, result.means)


class _WithGradient(torch.autograd.Function):
    """A scalar function of x whose value and gradient are already known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = x.dtype
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        scaled = ctx.saved_tensors[0] * g  # before rounding to x's type, for the sake of GradScaler
        return scaled.to(ctx.dtype), None, None


_largest_sigma: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()
"""For each model, the largest σ of its last step with two passes."""
_warned: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def _warn_once(model: nn.Module, reason: str) -> None:
    if _warned.get(model) != reason:
        _warned[model] = reason
        _log.warning(
            "undrop runs %s twice per step, since %s; in models with kinks (ReLU, max pooling) the "
            "gradient of the regularizers is then biased.",
            type(model).__name__,
            reason,
        )


def midpoint(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean of both passes, the value at ε = 0 up to O(ε₀²)."""
    return (a + b) * 0.5 if a.is_floating_point() else a
