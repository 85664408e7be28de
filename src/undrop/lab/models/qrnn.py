"""QRNN: gates that see the inputs only, so that all steps are computed at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from undrop.errors import OptionError
from undrop.lab.models.language import MODELS
from undrop.lab.models.recurrent import RecurrentLM, layer_sizes
from undrop.lab.models.scan import linear_scan
from undrop.lab.models.state import State
from undrop.nn.dropout import WeightDrop
from undrop.options import check_probability

__all__ = ["QRNN", "QRNNLayer"]


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
    """Quasi-recurrent layers in the frame of AWD-LSTM.

    Bradbury et al. 2017, "Quasi-recurrent neural networks", as in Merity, Keskar & Socher 2018, "An
    analysis of neural language modeling at multiple scales": DropConnect is on all weights of a
    layer, and only the first layer sees two inputs. The defaults are that model on WikiText-103.

    The state is one tuple for each layer: see :class:`QRNNLayer`.

    Args:
        vocab_size: the number of words.
        embedding_size: the size of the embedding, and of the last layer if tied.
        hidden_size: the size of the other layers.
        layers: the number of layers.
        window: how many inputs the first layer's gates see, 1 or 2; the others see 1.
        tied: whether the head uses the embedding's matrix.
        cutoffs: the first word of each tail of an adaptive softmax; none for a plain one.
        embedding_dropout: the probability to drop a word of the vocabulary for a whole batch.
        input_dropout: … to drop a feature of the embedded words, for a whole window.
        hidden_dropout: … to drop a feature between two layers, for a whole window.
        output_dropout: … to drop a feature of the last layer, for a whole window.
        weight_dropout: … to drop a weight of a layer, for a whole window and batch.
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
        sizes = layer_sizes(
            embedding_size=embedding_size, hidden_size=hidden_size, layers=layers, tied=tied
        )
        super().__init__(
            vocab_size,
            sizes,
            [
                QRNNLayer(a, b, window=1 if i else window, weight_dropout=weight_dropout)
                for i, (a, b) in enumerate(pairwise(sizes))
            ],
            tied=tied,
            cutoffs=cutoffs,
            embedding_dropout=embedding_dropout,
            input_dropout=input_dropout,
            hidden_dropout=hidden_dropout,
            output_dropout=output_dropout,
        )
