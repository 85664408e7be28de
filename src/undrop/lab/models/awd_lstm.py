"""AWD-LSTM: an LSTM language model with dropout on its weights and between all layers."""

from __future__ import annotations

from torch import nn

from undrop.lab.models.language import MODELS
from undrop.lab.models.recurrent import RecurrentLM
from undrop.nn.dropout import WeightDrop


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
