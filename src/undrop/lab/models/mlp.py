"""A multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from undrop import options


class MLP(nn.Module):
    """Linear layers with ReLU and dropout between them (Srivastava et al. 2014).

    Args:
        sizes: the number of inputs, of each hidden layer's units, and of outputs.
        dropout: the probability to drop a hidden unit.
        input_dropout: the probability to drop an input.
    """

    def __init__(
        self, sizes: Sequence[int], *, dropout: float = 0.5, input_dropout: float = 0.0
    ) -> None:
        super().__init__()
        p = options.check_probability("dropout", dropout)
        self.sizes = options.check_sizes("sizes", sizes, least=2)
        self.input_dropout = nn.Dropout(options.check_probability("input_dropout", input_dropout))
        self.layers = nn.ModuleList(_linear(a, b) for a, b in pairwise(self.sizes))
        self.hidden_dropouts = nn.ModuleList(nn.Dropout(p) for _ in self.sizes[2:])

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (B, sizes[-1]) for inputs (B, …) of sizes[0] numbers each."""
        first, *later = self.layers
        x = first(self.input_dropout(x.flatten(1)))
        for dropout, layer in zip(self.hidden_dropouts, later, strict=True):
            x = layer(dropout(F.relu(x)))
        return x


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer
