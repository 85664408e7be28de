"""Engines that differentiate twice: the paper's estimator, and the exact expectation for tiny models."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrop.autodiff import gradients
from undrop.engines.base import ENGINES, Engine, Evaluation, Request, WeightedParts, refuse_fraction
from undrop.engines.draw import Draw, ScaledNoise, ZeroLeaves
from undrop.errors import EngineError
from undrop.generators import Generators
from undrop.intercept import Interception, RngSnapshot, Rule, bare, is_sharded, keep_buffers
from undrop.intercept.attention import AttentionCall, unfused_attention, unfused_flex
from undrop.intercept.recurrent import RECURRENT, RecurrentCall, parse_call, run_layers
from undrop.kernels.flex import FlexCall, flex_attention
from undrop.losses import Derivatives

State = tuple[Tensor, ...]


def _lstm(ax: Tensor, ah: Tensor, state: State) -> State:
    i, f, g, o = (ax + ah).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(ax: Tensor, ah: Tensor, state: State) -> State:
    (rx, zx, nx), (rh, zh, nh) = ax.chunk(3, -1), ah.chunk(3, -1)
    z = torch.sigmoid(zx + zh)
    n = torch.tanh(nx + torch.sigmoid(rx + rh) * nh)
    return (n + z * (state[0] - n),)


CELLS: dict[Callable[..., object], Callable[[Tensor, Tensor, State], State]] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: lambda ax, ah, _: (torch.tanh(ax + ah),),
    torch.rnn_relu: lambda ax, ah, _: (torch.relu(ax + ah),),
}
"""The cell of each recurrent function: (W_ih x + b_ih, W_hh h + b_hh, state) ↦ new state.

The first tensor of a state is the hidden state h."""


def _direction(
    call: RecurrentCall, direction: int, x: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, State]:
    """Run one direction of one layer over a packed sequence; return its outputs and the final state.

    Args:
        call: the call of the layer; in its weights, a projection (``proj_size``) comes last.
        direction: 0, or 1 if time runs backwards.
        x: the packed sequence, of shape (Σ sizes, I).
        sizes: the number of sequences that are still running at each time step; torch packs the longest
            sequence first. A plain batch has the same number at every step.
    """
    width = len(call.weights) // call.directions
    w_ih, w_hh, *rest = call.weights[direction * width : (direction + 1) * width]
    b_ih, b_hh = (rest.pop(0), rest.pop(0)) if call.has_bias else (None, None)
    state = tuple(s[direction] for s in call.state)
    steps = F.linear(x, w_ih, b_ih).split(list(sizes))
    outputs: list[Tensor] = []
    for ax in reversed(steps) if direction else steps:
        n = len(ax)
        running = tuple(s[:n] for s in state)
        new = CELLS[call.function](ax, F.linear(running[0], w_hh, b_hh), running)
        if rest:
            new = (F.linear(new[0], rest[0]), *new[1:])
        outputs.append(new[0])
        # A sequence that has ended, or in reverse has not started, keeps its state.
        state = tuple(torch.cat((a, b[n:])) for a, b in zip(new, state, strict=True))
    return torch.cat(outputs[::-1] if direction else outputs), state


def _attention(mode: Interception, *args: Any, **kwargs: Any) -> Tensor:
    return unfused_attention(mode, AttentionCall(*args, **kwargs))


def _flex_attention(mode: Interception, *args: Any) -> Any:
    return unfused_flex(mode, FlexCall(*args))


def _layer(call: RecurrentCall) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer in plain operations, on a packed sequence or a batch."""
    if call.batch_sizes is not None:
        x, sizes, shape = call.x, call.batch_sizes.tolist(), call.x.shape[:1]
    else:
        x = call.x.transpose(0, 1) if call.batch_first else call.x
        sizes, shape = [x.shape[1]] * len(x), x.shape[:2]
        x = x.flatten(0, 1)
    results = [_direction(call, d, x, sizes) for d in range(call.directions)]
    outputs, finals = zip(*results, strict=True)
    out = torch.cat(outputs, -1).unflatten(0, shape)
    if call.batch_sizes is None and call.batch_first:
        out = out.transpose(0, 1)
    return out, tuple(torch.stack(states) for states in zip(*finals, strict=True))


def _recurrent(function: Callable[..., Any], mode: Interception, *args: Any) -> tuple[Tensor, ...]:
    return run_layers(mode, parse_call(function, args), _layer)


TWICE_DIFFERENTIABLE: Mapping[Callable[..., Any], Rule] = {
    F.scaled_dot_product_attention: _attention,
    flex_attention: _flex_attention,
    **{function: partial(_recurrent, function) for function in RECURRENT},
}
"""Rules that replace fused functions by plain operations, which can be differentiated twice."""


_log = logging.getLogger("undrop")
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_STEP = {torch.float64: 1e-5, torch.float32: 1e-2}
"""ε, before it is divided by the largest σ."""
_TOLERANCE = {torch.float64: 0.01, torch.float32: 0.2}
"""Rounding and kinks cause smaller relative differences."""


def check_derivative(request: Request, engine: str) -> None:
    """Compare Σ_j σ_j η_j ∂ℓ/∂z_j with (ℓ(ε) - ℓ(-ε))/2ε once per model, and warn if they differ.

    They differ if the model calls ``detach()`` or ``torch.no_grad()``, has a gradient hook, or has an
    autograd function whose backward is not its derivative.
    """
    model = request.batch.model
    if model in _checked or request.loss.has_side_effects or request.half_precision:
        return
    _checked.add(model)
    with torch.enable_grad():
        by_reverse_mode, by_differences, tolerance = _rates_of_change(request)
    if abs(by_reverse_mode - by_differences) > tolerance:
        _log.warning(
            "the %s engine misses a part of what dropout does in %s: along one draw of the noise the "
            "loss changes at a rate of %.3g, but reverse mode computes %.3g. Look for detach(), "
            "no_grad(), a gradient hook or a custom autograd function, or use engine='auto'.",
            engine,
            type(model).__name__,
            by_differences,
            by_reverse_mode,
        )


def _rates_of_change(request: Request) -> tuple[float, float, float]:
    """Return ∂ℓ/∂ε by reverse mode and by finite differences, and the tolerance for their difference."""
    model = bare(request.batch.model)  # DDP waits for the backward pass of every forward pass
    rng = RngSnapshot(model)
    draw = Draw("sign", request.draw.mask, request.draw.selection, Generators())
    request = replace(request, batch=request.batch._replace(model=model), draw=draw)

    def loss_under(mode: Interception) -> Tensor:
        rng.restore()
        with keep_buffers(model), mode:
            _, logits = request.run()
        with request.loss.keep_state():
            return request.loss.value(logits, request.batch.targets)

    zeros = ZeroLeaves(draw)
    loss = loss_under(Interception(model, zeros, TWICE_DIFFERENTIABLE))
    if not zeros.leaves or loss.dtype not in _STEP:
        return 0.0, 0.0, 0.0  # no site is chosen, or half precision
    products = torch.cat([x.double().flatten() for x in _products(loss, zeros)])
    step = _STEP[loss.dtype] / max(1.0, *(draw.scale(site) for site in zeros.sites))
    with torch.no_grad():
        modes = (Interception(model, ScaledNoise(draw, epsilon)) for epsilon in (step, -step))
        up, down = (float(loss_under(mode)) for mode in modes)
    rng.restore()
    by_differences = (up - down) / (2 * step)
    rounding = 100 * torch.finfo(loss.dtype).eps * abs(float(loss.detach())) / step
    size = max(float(products.norm()), abs(by_differences))  # the terms of the sum may cancel
    return float(products.sum()), by_differences, _TOLERANCE[loss.dtype] * size + rounding


def _products(scalar: Tensor, action: ZeroLeaves, **options: Any) -> list[Tensor]:
    """Return σ_j η_j ∂scalar/∂z_j of every site."""
    noise = map(action.draw.sigma_eta, action.sites, action.leaves)
    pairs = zip(noise, gradients(scalar, action.leaves, **options), strict=True)
    return [gradient * sigma_eta for sigma_eta, gradient in pairs if sigma_eta is not None]


class DoubleBackward(Engine):
    """An engine whose total contains a gradient, so that its backward pass differentiates twice."""

    def evaluate(self, request: Request) -> Evaluation:
        """Return c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε with a graph, and its parts."""
        refuse_fraction(self, request)
        if is_sharded(request.batch.model):  # FSDP frees parameters before a second backward pass
            raise EngineError(
                f"the {self.name} engine differentiates twice, which FSDP does not allow: use "
                "engine='antithetic'."
            )
        if request.loss.whole_output:
            raise EngineError(
                f"the {self.name} engine takes a loss of one output: use engine='antithetic' or "
                "'tangent'."
            )
        check_derivative(request, self.name)
        action = ZeroLeaves(request.draw)
        with Interception(request.batch.model, action, TWICE_DIFFERENTIABLE):
            output, logits = request.run()
        parts = self._parts(request, action, logits)
        c = request.coefficients
        return Evaluation(c.total(parts), WeightedParts(c, parts), lambda: output, self.name)

    @abstractmethod
    def _parts(self, request: Request, action: ZeroLeaves, logits: Tensor) -> Derivatives:
        """Return ℓ, the explicit part and the implicit part, without coefficients."""


@ENGINES.register("reverse")
class Reverse(DoubleBackward):
    """Algorithm 3 of the paper, for any mask structure.

    For each of the N terms of the loss, a label ŷ is drawn from the model's prediction. With
    S = Σ ℓ(F, ŷ), the explicit part is Σ_j σ_j² (∂S/∂z_j)² / N. The gradients of different terms are
    independent and have mean zero, so the square of their sum has the right mean even if terms share an
    η. The *value* is unbiased. Its gradient is not, because the probabilities of the labels are not
    differentiated. The implicit part is Σ_j σ_j η_j ∂ℓ/∂z_j.
    """

    name = "reverse"

    def _parts(self, request: Request, action: ZeroLeaves, logits: Tensor) -> Derivatives:
        c = request.coefficients
        loss = request.loss.value(logits, request.batch.targets)
        explicit = implicit = torch.zeros_like(loss)
        # Labels can't be drawn from a non-finite output; the caller sees a non-finite loss.
        if c.quadratic and bool(loss.detach().isfinite()):
            explicit = self._explicit(request, action, logits)
        if c.directional:
            products = _products(loss, action, create_graph=True)
            implicit = torch.stack([x.sum() for x in products]).sum()
        return Derivatives(loss, explicit, implicit)

    def _explicit(self, request: Request, action: ZeroLeaves, logits: Tensor) -> Tensor:
        loss, targets = request.loss, request.batch.targets
        generator = request.draw.generator(logits.device)
        sampled = loss.sampled(logits, targets, request.form, generator)
        by_site = gradients(sampled, action.leaves, create_graph=True)
        squares = [
            request.draw.scale(site) ** 2 * gradient.square().sum()
            for site, gradient in zip(action.sites, by_site, strict=True)
        ]
        return torch.stack(squares).sum() / loss.count(logits, targets)


@ENGINES.register("exact")
class Exact(DoubleBackward):
    """E_η[uᵀHu] = Σ_j σ_j² · (∂F/∂z_j)ᵀ H (∂F/∂z_j), over every entry j of every η.

    The implicit part has mean zero, so this engine leaves it out.
    """

    name = "exact"

    def _parts(self, request: Request, action: ZeroLeaves, logits: Tensor) -> Derivatives:
        zero = torch.zeros_like(logits.sum())
        needed = bool(request.coefficients.quadratic)
        explicit = self._explicit(request, action, logits) if needed else zero
        loss = request.loss.value(logits, request.batch.targets)
        return Derivatives(loss, explicit, zero)

    def _explicit(self, request: Request, action: ZeroLeaves, logits: Tensor) -> Tensor:
        rows = [gradients(f, action.leaves, create_graph=True) for f in logits.flatten()]
        explicit = torch.zeros_like(logits.sum())
        for site, *columns in zip(action.sites, *rows, strict=True) if rows else ():
            jacobian = torch.stack([x.flatten() for x in columns])  # (outputs, entries of η)
            for column in jacobian.unbind(1):
                u = column.view_as(logits) * request.draw.scale(site)
                with request.loss.keep_state():  # the loss is in the same state for every column
                    parts = request.loss.derivatives(logits, u, request.batch.targets, request.form)
                explicit = explicit + parts.quadratic
        return explicit
