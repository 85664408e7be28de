"""Stand-ins for fused functions of torch that have no double backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.intercept import Interception, Rule
from undrop.intercept.attention import AttentionCall, written_out
from undrop.intercept.flex import flex_written_out
from undrop.intercept.recurrent import RECURRENT, RecurrentCall, read, run_layers
from undrop.kernels.cells import CELLS, run_direction
from undrop.kernels.flex import FlexCall, flex_attention


def _attention(mode: Interception, *args: Any, **kwargs: Any) -> Tensor:
    return written_out(mode, AttentionCall(*args, **kwargs))


def _flex_attention(mode: Interception, *args: Any) -> Any:
    return flex_written_out(mode, FlexCall(*args))


def _layer(call: RecurrentCall) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in plain operations, on a packed sequence or a batch."""
    if call.batch_sizes is not None:
        x, sizes, shape = call.x, call.batch_sizes.tolist(), call.x.shape[:1]
    else:
        x = call.x.transpose(0, 1) if call.batch_first else call.x
        sizes, shape = [x.shape[1]] * len(x), x.shape[:2]
        x = x.flatten(0, 1)
    width = len(call.weights) // call.directions
    outputs, finals = [], []
    for d in range(call.directions):
        out, final = run_direction(
            CELLS[call.function],
            x,
            sizes,
            tuple(s[d] for s in call.state),
            call.weights[d * width : (d + 1) * width],
            has_bias=call.has_bias,
            reverse=d == 1,
        )
        outputs.append(out)
        finals.append(final)
    out = torch.cat(outputs, -1).unflatten(0, shape)
    if call.batch_sizes is None and call.batch_first:
        out = out.transpose(0, 1)
    return out, tuple(torch.stack(states) for states in zip(*finals, strict=True))


def _recurrent(function: Callable[..., Any], mode: Interception, *args: Any) -> tuple[Tensor, ...]:
    return run_layers(mode, read(function, args), _layer)


TWICE_DIFFERENTIABLE: Mapping[Callable[..., Any], Rule] = {
    F.scaled_dot_product_attention: _attention,
    flex_attention: _flex_attention,
    **{function: partial(_recurrent, function) for function in RECURRENT},
}
"""Rules for an interception under which every fused function is written out."""
