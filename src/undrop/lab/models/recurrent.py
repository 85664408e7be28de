"""AWD language models: dropouts around a stack of recurrent layers, and AWD-LSTM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from undrop.lab.models.language import MODELS, LanguageModel, State
from undrop.nn.adaptive import AdaptiveEmbedding
from undrop.nn.dropout import EmbeddingDropout, LockedDropout, WeightDrop
from undrop.options import check_int, check_probability

_SPREAD = 0.1  # initial embeddings are uniform in ±0.1, or normal with the same variance


class RecurrentLM(LanguageModel):
    """Embedding, recurrent layers and a softmax, with dropout between all of them.

    Masks between layers are locked: one for all steps of a window (Gal & Ghahramani 2016). A subclass
    makes the layers.

    Args:
        vocab_size: the number of words.
        embedding_size: the size of the embedding, and of the last layer if tied.
        hidden_size: the size of the other layers.
        layers: the number of layers.
        tied: whether the head uses the embedding's matrix.
        cutoffs: the first word of each tail of an adaptive softmax; none for a plain one.
        embedding_dropout: the probability to drop a word of the vocabulary for a whole batch.
        input_dropout: … to drop a feature of the embedded words, for a whole window.
        hidden_dropout: … to drop a feature between two layers, for a whole window.
        output_dropout: … to drop a feature of the last layer, for a whole window.
        weight_dropout: … to drop a weight within a layer, for a whole window and batch.
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
        made = [self.layer(i, a, b, weight_p) for i, (a, b) in enumerate(pairwise(sizes))]
        super().__init__(vocab_size, sizes[-1], tied=tied, cutoffs=cutoffs)
        p = check_probability("hidden_dropout", hidden_dropout)
        self.embedding = EmbeddingDropout(
            _embedding(vocab_size, sizes[0], cutoffs),
            check_probability("embedding_dropout", embedding_dropout),
        )
        self.input_dropout = LockedDropout(check_probability("input_dropout", input_dropout))
        self.layers = nn.ModuleList(made)
        self.hidden_dropouts = nn.ModuleList(LockedDropout(p) for _ in made[1:])
        self.output_dropout = LockedDropout(check_probability("output_dropout", output_dropout))

    @abstractmethod
    def layer(self, index: int, inputs: int, outputs: int, weight_dropout: float) -> nn.Module:
        """Make a layer, called as ``layer(x, state) -> (y, state)`` on (T, B, size)."""

    def features(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The last layer's dropped outputs, and each layer's state."""
        x = self.input_dropout(self.embedding(tokens))
        after: State = ()
        for layer, dropout, before in zip(
            self.layers,
            (*self.hidden_dropouts, self.output_dropout),
            state or (None,) * len(self.layers),
            strict=True,
        ):
            x, new = layer(x, before)
            x, after = dropout(x), (*after, new)
        return x, after

    def table(self) -> nn.Embedding | AdaptiveEmbedding:
        """The embedding, without its dropout."""
        return self.embedding.embedding


def _embedding(
    vocab_size: int, size: int, cutoffs: Sequence[int]
) -> nn.Embedding | AdaptiveEmbedding:
    if cutoffs:
        return AdaptiveEmbedding(vocab_size, size, cutoffs=cutoffs, std=_SPREAD / 3**0.5)
    embedding = nn.Embedding(vocab_size, size)
    nn.init.uniform_(embedding.weight, -_SPREAD, _SPREAD)
    return embedding


@MODELS.register("awd-lstm")
class AWDLSTM(RecurrentLM):
    """LSTM layers with DropConnect on their hidden-to-hidden weights and locked dropout between.

    Merity, Keskar & Socher 2018, "Regularizing and optimizing LSTM language models". The arguments are
    those of :class:`RecurrentLM`. The defaults are the model of Wei, Kakade & Ma 2020 on Penn Treebank
    and WikiText-2: q = 0.4 at all sites but the embedding's rows, which are not dropped.

    The state is ``((h, c), …)``, a pair (1, B, size) for each layer.
    """

    def layer(self, index: int, inputs: int, outputs: int, weight_dropout: float) -> nn.Module:
        """Make one nn.LSTM, a fused kernel; our own dropout is between the layers."""
        return WeightDrop(nn.LSTM(inputs, outputs), ["weight_hh_l0"], weight_dropout)
