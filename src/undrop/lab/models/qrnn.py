"""QRNN: gates see only the inputs, so that all steps are computed at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from undrop.errors import OptionError
from undrop.lab.models.language import MODELS, State
from undrop.lab.models.recurrent import RecurrentLM
from undrop.nn.dropout import WeightDrop
from undrop.options import check_probability


def linear_scan(a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
    """All c_t = a_t ⊙ c_{t-1} + b_t, with c_{-1} = ``initial``, in about log₂ T vectorised rounds.

    Two steps make one: c_{2k+1} = (a_{2k+1} a_{2k}) c_{2k-1} + (a_{2k+1} b_{2k} + b_{2k+1}). That
    recurrence of half the length gives the odd steps, and one more step from each gives the even
    ones: about 3T multiplications, where the loop has T. Without divisions, gates near 0 or 1 lose no
    precision; products and sums alone can be differentiated in any mode and order.

    Args:
        a: the factors (T, …), T ≥ 1.
        b: the inputs (T, …).
        initial: the value before the first step (1, …).

    Returns:
        c of shape (T, …).
    """
    steps, half = len(b), len(b) // 2
    if half == 0:
        return a * initial + b
    a_even, a_odd = _pairs(a, half)
    b_even, b_odd = _pairs(b, half)
    odd = linear_scan(a_odd * a_even, a_odd * b_even + b_odd, initial)
    even = a_even * torch.cat([initial, odd[:-1]]) + b_even
    c = torch.stack([even, odd], dim=1).flatten(0, 1)
    if steps == 2 * half:
        return c
    return torch.cat([c, a[-1:] * odd[-1:] + b[-1:]])


def _pairs(x: Tensor, half: int) -> tuple[Tensor, ...]:
    """The even and the odd steps, but for a last one without a partner."""
    paired = x if len(x) == 2 * half else x[: 2 * half]  # no slice, no copy in the backward pass
    return paired.view(half, 2, *x.shape[1:]).unbind(1)


class QRNNLayer(nn.Module):
    """One quasi-recurrent layer with fo-pooling.

    With (z_t, f_t, o_t) = W [x_t, x_{t-1}] + b (x_t alone for a window of 1),

        c_t = σ(f_t) c_{t-1} + (1 - σ(f_t)) tanh(z_t),   h_t = σ(o_t) c_t.

    The state is ``(c,)``, or ``(c, x)`` for a window of 2, of the last step, each (1, B, size).

    Args:
        input_size: the size of x.
        hidden_size: the size of c and h.
        window: how many inputs the gates see, 1 or 2.
        weight_dropout: the probability to drop an entry of W.
    """

    def __init__(
        self, input_size: int, hidden_size: int, *, window: int = 1, weight_dropout: float = 0.0
    ) -> None:
        super().__init__()
        if window not in (1, 2):
            raise OptionError(f"window must be 1 or 2, got {window!r}.")
        self.window = window
        self.hidden_size = hidden_size
        linear = nn.Linear(window * input_size, 3 * hidden_size)
        nn.init.zeros_(linear.bias)
        self.linear = WeightDrop(
            linear, ["weight"], check_probability("weight_dropout", weight_dropout)
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Outputs h (T, B, hidden) for inputs x (T, B, input), and the state after the last."""
        c, *previous = state or self._initial(x)
        seen = [x, *(torch.cat([before, x[:-1]]) for before in previous)]
        z, f, o = self.linear(torch.cat(seen, dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(f)
        c = linear_scan(keep, (1.0 - keep) * torch.tanh(z), c)
        return torch.sigmoid(o) * c, (c[-1:], *(x[-1:] for _ in previous))

    def _initial(self, x: Tensor) -> State:
        sizes = (self.hidden_size, x.shape[-1])[: self.window]
        return tuple(torch.zeros(1, x.shape[1], n, dtype=x.dtype, device=x.device) for n in sizes)


@MODELS.register("qrnn")
class QRNN(RecurrentLM):
    """AWD-LSTM's dropouts around quasi-recurrent layers.

    Bradbury et al. 2017, "Quasi-recurrent neural networks", as in Merity, Keskar & Socher 2018, "An
    analysis of neural language modeling at multiple scales": DropConnect is on all weights of a
    layer, and only the first layer sees two inputs. The defaults are that model on WikiText-103.

    The state is one tuple for each layer: see :class:`QRNNLayer`.

    Args:
        window: how many inputs the first layer's gates see, 1 or 2; the others see 1. All other
            arguments are those of :class:`RecurrentLM`.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        embedding_size: int = 400,
        hidden_size: int = 2500,
        layers: int = 4,
        window: int = 2,
        tied: bool = True,
        cutoffs: Sequence[int] = (),
        embedding_dropout: float = 0.0,
        input_dropout: float = 0.1,
        hidden_dropout: float = 0.1,
        output_dropout: float = 0.1,
        weight_dropout: float = 0.0,
    ) -> None:
        self.window = window
        super().__init__(
            vocab_size,
            embedding_size=embedding_size,
            hidden_size=hidden_size,
            layers=layers,
            tied=tied,
            cutoffs=cutoffs,
            embedding_dropout=embedding_dropout,
            input_dropout=input_dropout,
            hidden_dropout=hidden_dropout,
            output_dropout=output_dropout,
            weight_dropout=weight_dropout,
        )

    def layer(self, index: int, inputs: int, outputs: int, weight_dropout: float) -> nn.Module:
        """Make a layer; only the first one sees ``window`` inputs."""
        window = 1 if index else self.window
        return QRNNLayer(inputs, outputs, window=window, weight_dropout=weight_dropout)
