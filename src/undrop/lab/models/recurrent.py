"""AWD-LSTM and QRNN: language models with recurrent layers and dropout around each layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import OptionError
from undrop.lab.models.language import MODELS, LanguageModel, State
from undrop.nn.adaptive import AdaptiveEmbedding
from undrop.nn.dropout import EmbeddingDropout, LockedDropout, WeightDrop
from undrop.options import check_int, check_probability

_INITIAL_RANGE = 0.1  # initial embeddings are uniform in ±0.1, or normal with the same variance


class RecurrentLM(LanguageModel):
    """An embedding, recurrent layers and a softmax, with dropout before and after each layer.

    Masks between layers are locked: all time steps of a window have the same mask (Gal & Ghahramani
    2016). A subclass makes the layers.

    Args:
        vocab_size: the number of words.
        embedding_size: the size of the embedding, and also of the last layer if ``tied``.
        hidden_size: the size of the other layers.
        layers: the number of layers.
        tied: whether the head uses the embedding's matrix.
        cutoffs: the index of the first word of each tail cluster of an adaptive softmax; empty for a
            full softmax.
        embedding_dropout: the probability of dropping a word of the vocabulary for a whole batch.
        input_dropout: the probability of dropping a feature of a stream's embedded words, at all time
            steps of a window.
        hidden_dropout: the probability of dropping a feature of a stream between two layers, at all
            time steps of a window.
        output_dropout: the probability of dropping a feature of a stream after the last layer, at all
            time steps of a window.
        weight_dropout: the probability of dropping a weight within a layer, for all streams and time
            steps of a window.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        embedding_size: int = 400,
        hidden_size: int = 1150,
        layers: int = 3,
        tied: bool = True,
        cutoffs: Sequence[int] = (),
        embedding_dropout: float = 0.0,
        input_dropout: float = 0.4,
        hidden_dropout: float = 0.4,
        output_dropout: float = 0.4,
        weight_dropout: float = 0.4,
    ) -> None:
        embedding_size = check_int("embedding_size", embedding_size)
        hidden_size = check_int("hidden_size", hidden_size)
        hidden = (hidden_size,) * (check_int("layers", layers) - 1)
        sizes = (embedding_size, *hidden, embedding_size if tied else hidden_size)
        weight_p = check_probability("weight_dropout", weight_dropout)
        recurrent = [self.layer(i, a, b, weight_p) for i, (a, b) in enumerate(pairwise(sizes))]
        super().__init__(vocab_size, sizes[-1], tied=tied, cutoffs=cutoffs)
        p = check_probability("hidden_dropout", hidden_dropout)
        self.embedding = EmbeddingDropout(
            _embedding(vocab_size, sizes[0], cutoffs),
            check_probability("embedding_dropout", embedding_dropout),
        )
        self.input_dropout = LockedDropout(check_probability("input_dropout", input_dropout))
        self.layers = nn.ModuleList(recurrent)
        self.hidden_dropouts = nn.ModuleList(LockedDropout(p) for _ in recurrent[1:])
        self.output_dropout = LockedDropout(check_probability("output_dropout", output_dropout))

    @abstractmethod
    def layer(self, index: int, inputs: int, outputs: int, weight_dropout: float) -> nn.Module:
        """Return a new layer, which is called as ``layer(x, state) -> (y, state)`` on (T, B, size)."""

    def features(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the outputs of the last layer after dropout, and the state of each layer."""
        x = self.input_dropout(self.embedding(tokens))
        dropouts = (*self.hidden_dropouts, self.output_dropout)
        old_states = state or (None,) * len(self.layers)
        new_states = []
        for layer, dropout, old_state in zip(self.layers, dropouts, old_states, strict=True):
            x, new_state = layer(x, old_state)
            x = dropout(x)
            new_states.append(new_state)
        return x, tuple(new_states)

    def shared_embedding(self) -> Any:
        """Return the embedding without its dropout."""
        return self.embedding.embedding


def _embedding(
    vocab_size: int, size: int, cutoffs: Sequence[int]
) -> nn.Embedding | AdaptiveEmbedding:
    if cutoffs:
        return AdaptiveEmbedding(vocab_size, size, cutoffs=cutoffs, std=_INITIAL_RANGE / 3**0.5)
    embedding = nn.Embedding(vocab_size, size)
    nn.init.uniform_(embedding.weight, -_INITIAL_RANGE, _INITIAL_RANGE)
    return embedding


@MODELS.register(
    "awd-lstm", about="LSTM layers with DropConnect and locked dropout (Merity et al. 2018)"
)
class AWDLSTM(RecurrentLM):
    """LSTM layers with DropConnect on hidden-to-hidden weights, and locked dropout between layers.

    Merity, Keskar & Socher 2018, "Regularizing and optimizing LSTM language models". The arguments are
    those of :class:`RecurrentLM`. The defaults are the model of Wei, Kakade & Ma 2020 on Penn Treebank
    and WikiText-2: q = 0.4 at all sites, and no dropout of the embedding's rows.

    The state is ``((h, c), …)``, a pair of tensors (1, B, size) for each layer.
    """

    def layer(self, index: int, inputs: int, outputs: int, weight_dropout: float) -> nn.Module:
        """Return an ``nn.LSTM`` of one layer, so that the model's own dropout runs between layers."""
        return WeightDrop(nn.LSTM(inputs, outputs), ["weight_hh_l0"], weight_dropout)


def linear_scan(a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
    """Return all c_t = a_t ⊙ c_{t-1} + b_t, with c_{-1} = ``initial``, in log₂ T vectorized rounds.

    Two steps combine into one: c_{2k+1} = (a_{2k+1} a_{2k}) c_{2k-1} + (a_{2k+1} b_{2k} + b_{2k+1}).
    This recurrence of half the length gives the odd steps. The even steps follow from the odd steps
    before them. This takes about 3T multiplications; a loop takes T. There are no divisions, so gates
    near 0 or 1 lose no precision, and torch differentiates products and sums in any mode and to any
    order.

    Args:
        a: the factors (T, …), T ≥ 1.
        b: the inputs (T, …).
        initial: the value before the first step (1, …).

    Returns:
        c of shape (T, …).
    """
    half = len(b) // 2
    if half == 0:
        return a * initial + b
    a_even, a_odd = _pairs(a, half)
    b_even, b_odd = _pairs(b, half)
    odd = linear_scan(a_odd * a_even, a_odd * b_even + b_odd, initial)
    even = a_even * torch.cat([initial, odd[:-1]]) + b_even
    c = torch.stack([even, odd], dim=1).flatten(0, 1)
    return c if len(c) == len(b) else torch.cat([c, a[-1:] * odd[-1:] + b[-1:]])


def _pairs(x: Tensor, half: int) -> tuple[Tensor, ...]:
    """Return the even and the odd steps, without the last step if the number of steps is odd."""
    # A slice copies x in the backward pass, so slice only if it is necessary.
    paired = x if len(x) == 2 * half else x[: 2 * half]
    return paired.view(half, 2, *x.shape[1:]).unbind(1)


class QRNNLayer(nn.Module):
    """One quasi-recurrent layer with fo-pooling.

    With (z_t, f_t, o_t) = W [x_t, x_{t-1}] + b (x_t alone for a window of 1),

        c_t = sigmoid(f_t) c_{t-1} + (1 - sigmoid(f_t)) tanh(z_t),   h_t = sigmoid(o_t) c_t.

    The state holds the values at the last step, of shape (1, B, size): ``(c,)``, or ``(c, x)`` for a
    window of 2.

    Args:
        input_size: the size of x.
        hidden_size: the size of c and h.
        window: the number of inputs that the gates see, 1 or 2.
        weight_dropout: the probability of dropping an entry of W.
    """

    def __init__(
        self, input_size: int, hidden_size: int, *, window: int = 1, weight_dropout: float = 0.0
    ) -> None:
        super().__init__()
        if window not in (1, 2):
            raise OptionError(f"window must be 1 or 2, got {window!r}.")
        self.window, self.hidden_size = window, hidden_size
        p = check_probability("weight_dropout", weight_dropout)
        linear = nn.Linear(window * input_size, 3 * hidden_size)
        nn.init.zeros_(linear.bias)
        self.linear = WeightDrop(linear, ["weight"], p)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return the outputs h (T, B, hidden) for inputs x (T, B, input), and the state after them."""
        c, *previous = state or self._initial_state(x)
        inputs = [x, *(torch.cat([last, x[:-1]]) for last in previous)]
        z, f, o = self.linear(torch.cat(inputs, dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(f)
        c = linear_scan(keep, (1.0 - keep) * torch.tanh(z), c)
        return torch.sigmoid(o) * c, (c[-1:], *(x[-1:] for _ in previous))

    def _initial_state(self, x: Tensor) -> State:
        sizes = (self.hidden_size, x.shape[-1])[: self.window]
        return tuple(torch.zeros(1, x.shape[1], n, dtype=x.dtype, device=x.device) for n in sizes)


@MODELS.register(
    "qrnn", about="Quasi-recurrent layers with the dropouts of AWD-LSTM (Bradbury et al. 2017)"
)
class QRNN(RecurrentLM):
    """Quasi-recurrent layers with the dropouts of AWD-LSTM.

    Bradbury et al. 2017, "Quasi-recurrent neural networks", as in Merity, Keskar & Socher 2018, "An
    analysis of neural language modeling at multiple scales": DropConnect acts on all weights of a
    layer, and only the first layer sees two inputs. The defaults are their model on WikiText-103.

    The state is one tuple for each layer: see :class:`QRNNLayer`.

    Args:
        window: the number of inputs that the gates of the first layer see, 1 or 2; those of the other
            layers see 1. All other arguments are those of :class:`RecurrentLM`.
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
        """Return a new layer; only the first layer sees ``window`` inputs."""
        window = 1 if index else self.window
        return QRNNLayer(inputs, outputs, window=window, weight_dropout=weight_dropout)
