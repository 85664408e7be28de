"""Dropout on attention probabilities, which torch's fused attention hides."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.intercept.interception import SITE_RULES, Interception
from undrop.kernels.flex import FlexCall, attend, attend_without_kernel, flex_attention


class AttentionCall(NamedTuple):
    """The arguments of ``F.scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def ungrouped(call: AttentionCall) -> AttentionCall:
    """With grouped queries, repeat keys and values so that each query head has its own."""
    if not call.enable_gqa:
        return call
    n = call.query.shape[-3] // call.key.shape[-3]
    key, value = call.key.repeat_interleave(n, -3), call.value.repeat_interleave(n, -3)
    return call._replace(key=key, value=value, enable_gqa=False)


def probabilities(call: AttentionCall, softmax: Callable[[Tensor, int], Tensor]) -> Tensor:
    """softmax(QKᵀ·scale + mask); rows that are masked everywhere are zero, as in torch."""
    scale = 1.0 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale
    scores = (call.query * scale) @ call.key.transpose(-2, -1)
    bias = additive_mask(call)
    if bias is None:
        return softmax(scores, -1)
    empty = (bias == -math.inf).all(-1, keepdim=True)
    # If no key is allowed, take the softmax of zeros: that of -inf has a NaN gradient.
    bias = bias.masked_fill(empty, 0.0)
    return softmax(scores + bias, -1).masked_fill(empty, 0.0)


def additive_mask(call: AttentionCall) -> Tensor | None:
    """The mask as a term of the logits, 0 or -inf for a boolean one; None without a mask."""
    mask = call.attn_mask
    if call.is_causal:
        shape = (call.query.shape[-2], call.key.shape[-2])
        mask = torch.ones(shape, dtype=torch.bool, device=call.query.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=call.query.dtype, device=mask.device).masked_fill(
        ~mask, -math.inf
    )


def unfused_attention(
    mode: Interception,
    call: AttentionCall,
    softmax: Callable[[Tensor, int], Tensor] = torch.softmax,
) -> Tensor:
    """(softmax(QKᵀ·scale) ⊙ (1 + ε·σ·η)) V in plain operations: torch's fused kernel hides the mask."""
    call = ungrouped(call)
    p = probabilities(call, softmax)
    if call.dropout_p > 0.0:
        p = mode.noisy(
            p, call.dropout_p, kind="attention", mask="per probability", label="attention"
        )
    return p @ call.value


@SITE_RULES.register(F.scaled_dot_product_attention)
def _attention(mode: Interception, *args: Any, **kwargs: Any) -> Tensor:
    call = AttentionCall(*args, **kwargs)
    if call.dropout_p > 0.0:
        return unfused_attention(mode, call)
    return F.scaled_dot_product_attention(*args, **kwargs)


def _without_overrides(function: types.FunctionType) -> types.FunctionType:
    """A copy of a torch function that runs its body instead of dispatching to a mode.

    Inside a mode's handler the mode is off. Entering it again and calling the function would only
    dispatch the function once more. With the copy, the mode sees the calls *within* it.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    blind = dict.fromkeys(names, lambda *_: False)
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **blind},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_multi_head_attention = _without_overrides(inspect.unwrap(F.multi_head_attention_forward))


@SITE_RULES.register(F.multi_head_attention_forward)
def _multi_head(mode: Interception, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return _multi_head_attention(*args, **kwargs)


def _factors(mode: Interception, call: FlexCall) -> Tensor | None:
    """1 + ε·σ·η in the shape of the probabilities; None if it is 1 everywhere."""
    if call.dropout_p == 0.0:
        return None
    ones = call.ones()
    factors = mode.noisy(
        ones, call.dropout_p, kind="attention", mask="per probability", label="attention"
    )
    return None if factors is ones else factors


@SITE_RULES.register(flex_attention)
def _flex_attention(mode: Interception, *args: Any) -> Any:
    call = FlexCall(*args)
    return attend(call, _factors(mode, call))


def unfused_flex(
    mode: Interception, call: FlexCall, softmax: Callable[[Tensor, int], Tensor] = torch.softmax
) -> Any:
    """FlexAttention with noise in plain operations, for engines that the kernel does not support."""
    return attend_without_kernel(call, _factors(mode, call), softmax)
