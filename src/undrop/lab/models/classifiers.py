"""Small classifiers: a convolutional network and a multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from undrop.options import check_int, check_probability, check_sizes


class _Stage(nn.Module):
    """A 3 × 3 convolution, ReLU, max pooling by 2, and dropout of whole feature maps."""

    def __init__(self, inputs: int, outputs: int, *, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=not batch_norm)
        nn.init.kaiming_normal_(self.convolution.weight, nonlinearity="relu")
        self.norm = nn.BatchNorm2d(outputs) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.convolution(x)))
        x = self.dropout(F.max_pool2d(x, 2))
        return x


class ConvNet(nn.Module):
    """A convolutional classifier with dropout of feature maps (Tompson et al. 2015).

    Each side of an image must have at least 2 ** stages pixels.

    Args:
        channels: the number of channels of the images.
        classes: the number of classes.
        widths: the number of feature maps of each stage.
        feature_dropout: the probability of dropping a feature map.
        output_dropout: the probability of dropping an input of the linear classifier.
        batch_norm: whether each stage has batch normalization (Ioffe & Szegedy 2015).
    """

    def __init__(
        self,
        channels: int = 1,
        classes: int = 10,
        *,
        widths: Sequence[int] = (32, 64),
        feature_dropout: float = 0.1,
        output_dropout: float = 0.5,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        p = check_probability("feature_dropout", feature_dropout)
        widths = check_sizes("widths", widths, least=1)
        widths = (check_int("channels", channels), *widths)
        self.stages = nn.ModuleList(
            _Stage(a, b, dropout=p, batch_norm=batch_norm) for a, b in pairwise(widths)
        )
        self.output_dropout = nn.Dropout(check_probability("output_dropout", output_dropout))
        self.classifier = nn.Linear(widths[-1], check_int("classes", classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, classes) of images (B, channels, height, width)."""
        for stage in self.stages:
            x = stage(x)
        x = self.classifier(self.output_dropout(x.mean((2, 3))))
        return x


class MLP(nn.Module):
    """Linear layers with ReLU and dropout between them (Srivastava et al. 2014).

    Args:
        sizes: the numbers of inputs, of units in each hidden layer, and of outputs.
        dropout: the probability of dropping a hidden unit.
        input_dropout: the probability of dropping an input.
    """

    def __init__(
        self, sizes: Sequence[int], *, dropout: float = 0.5, input_dropout: float = 0.0
    ) -> None:
        super().__init__()
        p = check_probability("dropout", dropout)
        self.sizes = check_sizes("sizes", sizes, least=2)
        self.input_dropout = nn.Dropout(check_probability("input_dropout", input_dropout))
        self.layers = nn.ModuleList(_linear(a, b) for a, b in pairwise(self.sizes))
        self.hidden_dropouts = nn.ModuleList(nn.Dropout(p) for _ in self.sizes[2:])

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (B, sizes[-1]) for inputs (B, …), each of sizes[0] numbers."""
        first, *others = self.layers
        x = first(self.input_dropout(x.flatten(1)))
        for dropout, layer in zip(self.hidden_dropouts, others, strict=True):
            x = layer(dropout(F.relu(x)))
        return x


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer with the initialization of He et al. 2015 for ReLU."""
    layer = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer
