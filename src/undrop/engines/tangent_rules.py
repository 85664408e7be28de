"""Rules for functions whose forward mode is missing in torch, or wrong.

A rule unpacks dual numbers into primal and tangent, computes the result and its tangent with ordinary
differentiable operations, and packs them into a dual number. So the reverse pass is an ordinary one. To
add a rule, register it: ``@TANGENT_RULES.register(function)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward
import torch.nn.functional as F
from torch import Tensor

from undrop.engines.reverse import TWICE_DIFFERENTIABLE
from undrop.errors import EngineError
from undrop.intercept import Interception, Rule, tensors_in
from undrop.intercept.attention import AttentionCall, unfused_attention, unfused_flex
from undrop.kernels.flex import FlexCall, flex_attention
from undrop.registry import Registry

TANGENT_RULES: Registry[Callable[..., Any], Rule] = Registry("tangent rule")
"""Functions, and the rules that the tangent engine calls in their place."""

for _function, _rule in TWICE_DIFFERENTIABLE.items():
    if _function not in (F.scaled_dot_product_attention, flex_attention):
        TANGENT_RULES.register(_function)(_rule)  # recurrent layers, written out step by step


def unpacked(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the primal and the tangent of x; the tangent is None if x is not a dual number."""
    primal, tangent = forward.unpack_dual(x)
    return primal, tangent


def packed(primal: Tensor, tangent: Tensor | None) -> Tensor:
    """Return the dual number (primal, tangent), or the primal alone if the tangent is None."""
    if tangent is None:
        return primal
    dual: Tensor = forward.make_dual(primal, tangent)
    return dual


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether any of the tensors is a dual number."""
    return any(t is not None and unpacked(t)[1] is not None for t in tensors)


BACKWARD: dict[Callable[..., Any], str] = {
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
    Tensor.backward: "Tensor.backward",
    Tensor.register_hook: "Tensor.register_hook",
}
"""Functions that compute or change a derivative inside a model. They lose the tangent."""


def _refuse_tangents(
    function: Callable[..., Any], mode: Interception, *args: Any, **kwargs: Any
) -> Any:
    if has_tangent(*(t for t in tensors_in((args, kwargs)) if t.is_floating_point())):
        raise EngineError(
            f"the tangent engine has no proven rule for {BACKWARD[function]}: use "
            "engine='antithetic', which needs none."
        )
    return function(*args, **kwargs)


for _backward in BACKWARD:
    TANGENT_RULES.register(_backward)(partial(_refuse_tangents, _backward))


def _softmax(
    function: Callable[..., Tensor], mode: Interception, input: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """ṗ = p(ẋ - Σ p ẋ); the tangent of log p is ẋ - Σ p ẋ."""
    x, tangent = unpacked(input)
    out = function(x, *args, **kwargs)
    if tangent is None:
        return out
    dim = args[0] if args else kwargs.get("dim")
    if dim is None:  # torch warns and chooses this one
        dim = 0 if x.dim() in (0, 1, 3) else 1
    log = function.__name__ == "log_softmax"
    tangent, p = tangent.to(out.dtype), out.exp() if log else out
    px = p * tangent
    total = px.sum(dim, keepdim=True)
    return packed(out, tangent - total if log else torch.addcmul(px, p, total, value=-1.0))


for _name in ("softmax", "log_softmax"):
    for _function in (getattr(owner, _name) for owner in (F, torch, Tensor)):
        TANGENT_RULES.register(_function)(partial(_softmax, _function))


@TANGENT_RULES.register(F.linear)
def _linear(
    mode: Interception, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The tangent is ẋWᵀ + xẆᵀ + ḃ. Torch's own rule loads its compiler if the bias has no tangent."""
    if not has_tangent(input, weight, bias):
        return F.linear(input, weight, bias)
    (x, dx), (w, dw) = unpacked(input), unpacked(weight)
    b, db = (None, None) if bias is None else unpacked(bias)
    out = F.linear(x, w, b)
    tangent = out.new_zeros(()) if dx is None else F.linear(dx, w)
    tangent = tangent if dw is None else tangent + F.linear(x, dw)
    tangent = tangent if db is None else tangent + db
    return packed(out, tangent.expand_as(out))


@TANGENT_RULES.register(torch.logsumexp, Tensor.logsumexp)
def _logsumexp(mode: Interception, input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """The tangent of log Σ exp x is Σ softmax(x) ẋ."""
    x, tangent = unpacked(input)
    out = torch.logsumexp(x, dim, keepdim=keepdim)
    if tangent is None:
        return out
    p = (x - torch.logsumexp(x, dim, keepdim=True)).exp()
    return packed(out, (p * tangent).sum(dim, keepdim=keepdim))


@TANGENT_RULES.register(F.scaled_dot_product_attention)
def _attention(mode: Interception, *args: Any, **kwargs: Any) -> Tensor:
    """Attention in plain operations: torch's fused kernels have no forward mode."""
    call = AttentionCall(*args, **kwargs)
    tensors = (call.query, call.key, call.value, call.attn_mask)
    if call.dropout_p == 0.0 and not has_tangent(*tensors):
        return F.scaled_dot_product_attention(*args, **kwargs)
    return unfused_attention(mode, call, partial(_softmax, torch.softmax, mode))


@TANGENT_RULES.register(flex_attention)
def _flex_attention(mode: Interception, *args: Any) -> Any:
    """FlexAttention in plain operations."""
    return unfused_flex(mode, FlexCall(*args), partial(_softmax, torch.softmax, mode))


def _normalized(
    x: Tensor, dims: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x - mean)/sqrt(var + eps) · weight + bias, in operations that are right on dual numbers."""
    centered = x - x.mean(dims, keepdim=True)
    out = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@TANGENT_RULES.register(F.layer_norm)
def _layer_norm(
    mode: Interception,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm in plain operations: torch's gradient through its tangent is silently wrong."""
    if not has_tangent(input, weight, bias):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    size = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    return _normalized(input, tuple(range(-size, 0)), weight, bias, eps)


def _channel_norm(
    function: Callable[..., Tensor],
    leading_dims: tuple[int, ...],
    mode: Interception,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    batch_statistics: bool | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    **flag: bool,
) -> Tensor:
    """Batch and instance norm in plain operations, over ``leading_dims`` and the spatial dimensions.

    F.batch_norm has the argument ``training``, and F.instance_norm ``use_input_stats`` in its place.
    Torch's own function updates the running statistics.
    """
    if batch_statistics is None:  # by default True for F.instance_norm only
        batch_statistics = next(iter(flag.values()), function is F.instance_norm)
    rest = (running_mean, running_var, weight, bias, batch_statistics, momentum, eps)
    if not batch_statistics or not has_tangent(input, weight, bias):
        return function(input, *rest)
    if running_mean is not None:
        with torch.no_grad():
            function(unpacked(input)[0], running_mean, running_var, None, None, *rest[4:])
    shape = (-1, *(1,) * (input.dim() - 2))  # one value per channel, which is dimension 1
    weight, bias = (t if t is None else t.view(shape) for t in (weight, bias))
    return _normalized(input, (*leading_dims, *range(2, input.dim())), weight, bias, eps)


TANGENT_RULES.register(F.batch_norm)(partial(_channel_norm, F.batch_norm, (0,)))
TANGENT_RULES.register(F.instance_norm)(partial(_channel_norm, F.instance_norm, ()))
