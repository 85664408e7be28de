"""FlexAttention with dropout on the attention probabilities; torch's FlexAttention has no dropout.

Dropout multiplies the attention probabilities p by factors m = 1 + ε·σ·η. Torch's kernel does not
return p, but two calls of the kernel are enough. For scores s and values v,

    Σ_k p_k m_k v_k = exp(lse′ - lse) · flex_attention(scores s + log m),

where lse = log Σ exp(s) comes from the first call, without noise, and lse′ = log Σ m exp(s) from the
second. m = 0 is a score of -inf, so a dropped key is a masked key. A negative m has no logarithm and
gives NaN.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from undrop.errors import OptionError


class FlexCall(NamedTuple):
    """The arguments of :func:`flex_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Tensor] | None = None
    block_mask: Any = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: dict[str, Any] | None = None
    return_aux: Any = None
    dropout_p: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the attention probabilities."""
        return (*self.query.shape[:-1], self.key.shape[-2])

    def ones(self) -> Tensor:
        """Return ones in the shape of the probabilities, in single precision at least."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        return torch.ones(self.shape, dtype=wide, device=self.query.device)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    dropout_p: float = 0.0,
) -> Any:
    """``torch.nn.attention.flex_attention.flex_attention`` with ``dropout_p``, as in torch's SDPA.

    Under undrop's objectives, a call with ``dropout_p`` is an attention site. Elsewhere the call drops
    even in eval mode, so pass ``self.p if self.training else 0.0``. If you request the log-sum-exp, it
    is computed without dropout.

    The noise takes memory: one number per query and key. On the CPU, torch's kernels have no gradient,
    so attention is computed in plain operations.

    Args:
        query: (batch, heads, queries, width).
        key: (batch, heads, keys, width).
        value: (batch, heads, keys, width of the output).
        score_mod: as in torch.
        block_mask: as in torch.
        scale: as in torch.
        enable_gqa: as in torch.
        return_lse: as in torch.
        kernel_options: as in torch.
        return_aux: as in torch.
        dropout_p: the drop probability of every attention probability.
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise OptionError(f"dropout_p must lie in [0, 1], got {dropout_p}.")
    call = FlexCall(
        *(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse),
        *(kernel_options, return_aux, dropout_p),
    )
    tensors = (query, key, value)
    if has_torch_function(tensors):
        arguments: Any = call  # by position, as the site rule of this function takes them
        return handle_torch_function(flex_attention, tensors, *arguments)
    if dropout_p > 0.0:
        return attend(call, F.dropout(call.ones(), dropout_p))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return attend(call, None)
    return _result(call, *_call_kernel(call, call.score_mod))


def attend(call: FlexCall, factors: Tensor | None) -> Any:
    """Return Σ_k p_k m_k v_k for the factors m of the probabilities; None means m = 1."""
    on_cpu = call.query.device.type == "cpu"
    return (attend_without_kernel if on_cpu else attend_with_kernel)(call, factors)


def attend_with_kernel(call: FlexCall, factors: Tensor | None) -> Any:
    """Call torch's kernel twice: for the log-sum-exp, and with log m added to the scores."""
    out, lse, largest = _call_kernel(call, call.score_mod)
    if factors is None:
        return _result(call, out, lse, largest)
    if factors.shape != call.shape:
        raise ValueError(
            f"the noise has shape {tuple(factors.shape)}, the attention probabilities {call.shape}"
        )
    score_mod, log_factors = call.score_mod or _unmodified, factors.log()

    def with_noise(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score_mod(score, b, h, q, k) + log_factors[b, h, q, k]

    noisy, noisy_lse, _ = _call_kernel(call, with_noise)
    empty = lse == -math.inf  # queries without an allowed key, whose output is zero
    gap = noisy_lse.masked_fill(empty, 0.0) - lse.masked_fill(empty, 0.0)
    return _result(call, noisy * gap.exp().unsqueeze(-1).to(noisy.dtype), lse, largest)


def attend_without_kernel(
    call: FlexCall, factors: Tensor | None, softmax: Callable[[Tensor, int], Tensor] = torch.softmax
) -> Any:
    """Compute attention in plain operations, which every engine can differentiate.

    Torch's own function does the same where it has no kernel.
    """
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (call.key, call.value))
    scale = 1.0 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale
    wide = torch.promote_types(call.query.dtype, torch.float32)
    scores = _modified(call, (call.query.to(wide) @ key.to(wide).transpose(-2, -1)) * scale)
    with torch.no_grad():
        empty = (scores.detach() == -math.inf).all(-1, keepdim=True)
    # For a query without an allowed key, all scores are -inf, and their softmax would be NaN.
    filled = scores.masked_fill(empty, 0.0)
    p = softmax(filled, -1).masked_fill(empty, 0.0)
    if factors is not None:
        p = p * factors
    out = p.to(call.query.dtype) @ value
    if not (call.return_lse or call.return_aux is not None):
        return out
    lse = filled.logsumexp(-1).masked_fill(empty.squeeze(-1), -math.inf)
    return _result(call, out, lse, scores.amax(-1))


def _modified(call: FlexCall, scores: Tensor) -> Tensor:
    """Apply ``score_mod`` to the scores, and put -inf where ``block_mask`` excludes a key."""
    if call.score_mod is None and call.block_mask is None:
        return scores
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import create_mask

    if call.score_mod is not None:
        indices = [torch.arange(n, device=scores.device) for n in scores.shape]
        modify = call.score_mod
        for dim in (3, 2, 1, 0):
            in_dims = (0, *(0 if d == dim else None for d in range(4)))  # of (score, b, h, q, k)
            modify = torch.vmap(modify, in_dims=in_dims)
        with TransformGetItemToIndex():  # allows bias[b, h] under vmap
            scores = modify(scores, *indices)
    if call.block_mask is not None:
        b, h, q, k = scores.shape
        allowed = create_mask(call.block_mask.mask_mod, b, h, q, k, device=scores.device)
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores


def _unmodified(score: Tensor, *indices: Tensor) -> Tensor:
    return score


@cache
def _has_return_aux() -> bool:
    """Return whether this torch has the argument ``return_aux``, which replaces ``return_lse``."""
    from torch.nn.attention import flex_attention as module

    return "return_aux" in inspect.signature(module.flex_attention).parameters


def _call_kernel(call: FlexCall, score_mod: Callable[..., Tensor] | None) -> tuple[Any, Any, Any]:
    """Return torch's output, log-sum-exp and largest scores; the last two may be None if not needed."""
    from torch.nn.attention import flex_attention as module

    attention: Any = module.flex_attention
    arguments = (*call[:3], score_mod, *call[4:7])
    options = {"kernel_options": call.kernel_options}
    aux = call.return_aux
    lse = call.dropout_p > 0.0 or call.return_lse or (aux is not None and aux.lse)
    if not _has_return_aux():
        result = attention(*arguments, return_lse=lse, **options)
        return (*result, None) if isinstance(result, tuple) else (result, None, None)
    largest = aux is not None and aux.max_scores
    if not lse and not largest:
        return attention(*arguments, **options), None, None
    request = module.AuxRequest(lse=lse, max_scores=largest)
    out, extras = attention(*arguments, return_aux=request, **options)
    return out, extras.lse, extras.max_scores


def _result(call: FlexCall, out: Tensor, lse: Tensor | None, largest: Tensor | None) -> Any:
    """Return the output in the form of torch's function, with the extras that the call requests."""
    if call.return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        aux = call.return_aux
        return out, AuxOutput(lse if aux.lse else None, largest if aux.max_scores else None)
    return (out, lse) if call.return_lse else out
