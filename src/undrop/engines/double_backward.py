"""Fused functions of torch that have no double backward, written out in plain operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.intercept import Interception, Rule
from undrop.intercept.attention import AttentionCall, written_out
from undrop.intercept.flex import flex_written_out
from undrop.intercept.recurrent import RECURRENT, RecurrentCall, read, run_layers
from undrop.kernels.flex import FlexCall, flex_attention

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


def _tanh(ax: Tensor, ah: Tensor, state: State) -> State:
    return (torch.tanh(ax + ah),)


def _relu(ax: Tensor, ah: Tensor, state: State) -> State:
    return (torch.relu(ax + ah),)


CELLS: dict[Callable[..., object], Callable[[Tensor, Tensor, State], State]] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _tanh,
    torch.rnn_relu: _relu,
}
"""From a step's input and hidden pre-activations and the state to the new state (hidden first)."""


def run_direction(
    cell: Callable[[Tensor, Tensor, State], State],
    x: Tensor,
    sizes: Sequence[int],
    state: State,
    weights: Sequence[Tensor],
    *,
    has_bias: bool,
    reverse: bool,
) -> tuple[Tensor, State]:
    """Run one direction of one layer over a packed sequence x (Σ sizes, I).

    ``sizes`` are the numbers of sequences still running at each step, the longest first, as torch
    packs them; a plain batch has the same number at every step. The state is (B, H) each. A
    projection of the hidden state (``proj_size``) is the last weight where there is one.
    """
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = (rest[0], rest[1]) if has_bias else (None, None)
    projection = rest[2 if has_bias else 0] if len(rest) in (1, 3) else None
    steps = F.linear(x, w_ih, b_ih).split(list(sizes))
    outputs: list[Tensor] = []
    for ax in reversed(steps) if reverse else steps:
        n = len(ax)
        running = tuple(s[:n] for s in state)
        new = cell(ax, F.linear(running[0], w_hh, b_hh), running)
        if projection is not None:
            new = (F.linear(new[0], projection), *new[1:])
        outputs.append(new[0])
        # Sequences that are not running now keep their state: ended, or in reverse not begun yet.
        state = tuple(torch.cat((a, b[n:])) for a, b in zip(new, state, strict=True))
    return torch.cat(outputs[::-1] if reverse else outputs), state


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
