"""Site rules of torch's recurrent networks: one fused call hides the dropout between their layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from undrop.intercept.interception import SITE_RULES, Interception
from undrop.torch_compat import lstm

RECURRENT: tuple[Callable[..., Any], ...] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class RecurrentCall(NamedTuple):
    """The arguments of ``torch.lstm`` and similar functions, for a batch or a packed sequence."""

    function: Callable[..., Any]
    x: Tensor
    batch_sizes: Tensor | None
    """The batch sizes of a packed sequence; None for a batch."""
    state: tuple[Tensor, ...]
    weights: Sequence[Tensor]
    has_bias: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        """2 for a bidirectional network, else 1."""
        return 2 if self.bidirectional else 1

    def layer(self, index: int, x: Tensor) -> RecurrentCall:
        """Return the call that runs only the layer with this index, on x."""
        width = len(self.weights) // self.layers
        rows = slice(index * self.directions, (index + 1) * self.directions)
        return self._replace(
            x=x,
            state=tuple(s[rows] for s in self.state),
            weights=self.weights[index * width : (index + 1) * width],
            layers=1,
            dropout=0.0,
        )

    @property
    def batch_size(self) -> int:
        """The number of examples in x."""
        if self.batch_sizes is not None:
            return int(self.batch_sizes[0])
        return self.x.shape[0 if self.batch_first else 1]

    def run(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run torch's function; return the output and the final state.

        Raises:
            RuntimeError: if the state and x differ in their batch size. torch's functions do not check
                this, and oneDNN would write outside of its memory.
        """
        batch = self.batch_size
        if any(s.shape[1] != batch for s in self.state):
            raise RuntimeError(
                f"a recurrent layer got {batch} examples and a state of another batch size"
            )
        state: Any = list(self.state) if self.function is torch.lstm else self.state[0]
        tail = (self.has_bias, self.layers, self.dropout, self.training, self.bidirectional)
        weights = list(self.weights)
        function = portable(self.function)
        if self.batch_sizes is not None:
            out, *final = function(self.x, self.batch_sizes, state, weights, *tail)
        else:
            out, *final = function(self.x, state, weights, *tail, self.batch_first)
        return out, tuple(final)


RunLayer: TypeAlias = Callable[[RecurrentCall], tuple[Tensor, tuple[Tensor, ...]]]
"""Runs one layer; returns its output and its final state."""


def parse_call(function: Callable[..., Any], args: tuple[Any, ...]) -> RecurrentCall:
    """Parse the arguments of a call from torch's own modules, which pass them all by position."""
    packed = isinstance(args[2], Tensor) or not isinstance(args[3], bool)
    batch_sizes = args[1] if packed else None
    state, weights, *rest = args[2 if packed else 1 :]
    state = (state,) if isinstance(state, Tensor) else tuple(state)
    batch_first = False if packed else bool(rest.pop())
    fields: Any = (function, args[0], batch_sizes, state, weights, *rest, batch_first)
    return RecurrentCall(*fields)


def run_layers(mode: Interception, call: RecurrentCall, run: RunLayer) -> tuple[Tensor, ...]:
    """Run layer after layer, with a site between each pair of layers."""
    x, finals = call.x, []
    for index in range(call.layers):
        x, final = run(call.layer(index, x))
        finals.append(final)
        if call.training and call.dropout > 0.0 and index + 1 < call.layers:
            x = mode.noisy(x, call.dropout, kind="recurrent", label=f"layer{index}")
    return (x, *(torch.cat(states) for states in zip(*finals, strict=True)))


def portable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, or its replacement that works on every CPU."""
    return lstm if function is torch.lstm else function


def _recurrent(function: Callable[..., Any], mode: Interception, *args: Any) -> Any:
    call = parse_call(function, args)
    if not call.training or call.dropout == 0.0 or call.layers == 1:
        return portable(function)(*args)
    return run_layers(mode, call, RecurrentCall.run)


for _function in RECURRENT:
    SITE_RULES.register(_function)(partial(_recurrent, _function))
