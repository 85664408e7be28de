"""AWD-LSTM: an LSTM language model with dropout wherever it can be put."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from undrop.lab.models.language import MODELS
from undrop.lab.models.recurrent import RecurrentLM, layer_sizes
from undrop.nn.dropout import WeightDrop
from undrop.options import check_probability

__all__ = ["AWDLSTM"]


@MODELS.register("awd-lstm")
class AWDLSTM(RecurrentLM):
    """LSTM layers with DropConnect on their hidden-to-hidden weights and locked dropout between.

    Merity, Keskar & Socher 2018, "Regularizing and optimizing LSTM language models". The defaults
    are the model of Wei, Kakade & Ma 2020 on Penn Treebank and WikiText-2: q = 0.4 at all sites
    but the embedding's rows, which are not dropped.

    The state is ``((h, c), …)``, a pair (1, B, size) for each layer.

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
        weight_dropout: … to drop a hidden-to-hidden weight, for a whole window and batch.
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
        sizes = layer_sizes(
            embedding_size=embedding_size, hidden_size=hidden_size, layers=layers, tied=tied
        )
        p = check_probability("weight_dropout", weight_dropout)
        # One nn.LSTM per layer: what lies between the layers is ours, and each is a fused kernel.
        super().__init__(
            vocab_size,
            sizes,
            [WeightDrop(nn.LSTM(a, b), ["weight_hh_l0"], p) for a, b in pairwise(sizes)],
            tied=tied,
            cutoffs=cutoffs,
            embedding_dropout=embedding_dropout,
            input_dropout=input_dropout,
            hidden_dropout=hidden_dropout,
            output_dropout=output_dropout,
        )
