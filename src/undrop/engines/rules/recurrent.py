"""LSTM and GRU by hand-written kernels: torch's fused layers have no forward-mode rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undrop.engines.double_backward import TWICE_DIFFERENTIABLE
from undrop.engines.rules.dual import TangentField, has_tangent, packed, padded, unpacked
from undrop.intercept import Handler, Interception
from undrop.intercept.recurrent import RECURRENT, RecurrentCall, read, run_layers
from undrop.kernels.gru import gru
from undrop.kernels.lstm import lstm

__all__ = ["RULES"]

State = tuple[Tensor, ...]


def _gru(
    x: Tensor, dx: Tensor | None, state: State, dstate: State | None, *weights: Any, rows: int
) -> tuple[Tensor, Tensor | None, State, State | None]:
    """The GRU kernel with its state in a tuple, like the LSTM's."""
    y, dy, last, dlast = gru(
        x, dx, state[0], None if dstate is None else dstate[0], *weights, rows=rows
    )
    return y, dy, (last,), None if dlast is None else (dlast,)


KERNELS: Mapping[Callable[..., Any], Callable[..., Any]] = {torch.lstm: lstm, torch.gru: _gru}


def _direction(
    call: RecurrentCall, field: TangentField, x: Tensor, state: State, weights: list[Tensor]
) -> tuple[Tensor, State]:
    """One direction of a layer over x (T, B, I), on dual numbers."""
    rows = field.carrying(x, 1)
    x, dx = unpacked(x)
    states = [unpacked(s) for s in state]
    (w_ih, dw_ih), (w_hh, dw_hh) = (unpacked(w) for w in weights[:2])
    biases = [unpacked(b)[0] for b in weights[2:]] if call.has_bias else [None, None]
    dstate = None
    if any(d is not None for _, d in states):
        dstate = tuple((torch.zeros_like(s) if d is None else d)[:rows] for s, d in states)
    still = all(t is None for t in (dx, dstate, dw_ih, dw_hh))
    y, dy, final, dfinal = KERNELS[call.function](
        x,
        None if dx is None else dx[:, :rows],
        tuple(s for s, _ in states),
        dstate,
        w_ih,
        w_hh,
        *biases,
        dw_ih,
        dw_hh,
        rows=0 if still else rows,
    )
    dfinal = (None,) * len(final) if dfinal is None else dfinal
    out = packed(y, padded(dy, y, 1))
    return out, tuple(packed(a, padded(d, a, 0)) for a, d in zip(final, dfinal, strict=True))


def _layer(call: RecurrentCall, *, field: TangentField) -> tuple[Tensor, State]:
    """One layer, in both directions where it has two."""
    x = call.x.transpose(0, 1) if call.batch_first else call.x
    width = len(call.weights) // call.directions
    outputs, finals = [], []
    for d in range(call.directions):
        weights = list(call.weights[d * width : (d + 1) * width])
        state = tuple(s[d] for s in call.state)
        out, final = _direction(call, field, x.flip(0) if d else x, state, weights)
        outputs.append(out.flip(0) if d else out)
        finals.append(final)
    out = torch.cat(outputs, -1) if call.bidirectional else outputs[0]
    last = tuple(torch.stack(states) for states in zip(*finals, strict=True))
    return (out.transpose(0, 1) if call.batch_first else out), last


def _recurrent(
    mode: Interception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    call = read(func, args)
    width = 4 if call.has_bias else 2
    projected = len(call.weights) != width * call.layers * call.directions
    noisy_bias = has_tangent(*(w for w in call.weights if w.dim() == 1))
    field = mode.field
    unusual = call.batch_sizes is not None or projected or noisy_bias
    if unusual or not isinstance(field, TangentField):
        return TWICE_DIFFERENTIABLE[func](mode, func, args, kwargs)
    return run_layers(mode, call, partial(_layer, field=field))


RULES: Mapping[Callable[..., Any], Handler] = {
    **{function: TWICE_DIFFERENTIABLE[function] for function in RECURRENT},
    torch.lstm: _recurrent,
    torch.gru: _recurrent,
}
