"""The small nets that every engine is checked on: a model, inputs, targets and a loss, in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from undrop.losses import MSE, BCEWithLogits, CrossEntropy, Generic, Loss
from undrop.nn import EmbeddingDropout, LockedDropout, WeightDrop

D = torch.float64


@dataclass(frozen=True)
class Problem:
    """What an objective is called with, and the loss."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss: Loss

    def with_loss(self, name: str) -> "Problem":
        """The same net with another loss, and targets that fit it."""
        loss = LOSSES[name]()
        if isinstance(loss, CrossEntropy):
            return replace(self, loss=loss)
        output = self.model(*self.inputs) if isinstance(self.inputs, tuple) else None
        output = self.model(self.inputs) if output is None else output
        output = output if isinstance(output, Tensor) else output[0]
        return replace(self, loss=loss, targets=torch.rand(output.shape, dtype=D))


def softened(output: Tensor, target: Tensor) -> Tensor:
    """A loss that couples all outputs of a row and has no closed form in undrop."""
    return (1 + (output - target).square().sum(-1)).log().mean()


LOSSES: dict[str, Callable[[], Loss]] = {
    "cross-entropy": CrossEntropy,
    "smoothed": lambda: CrossEntropy(label_smoothing=0.2, ignore_index=1),
    "bce": BCEWithLogits,
    "mse": MSE,
    "generic": lambda: Generic(softened),
}


class Recurrent(nn.Module):
    """Locked masks at input and output and DropConnect on the hidden-to-hidden weights."""

    def __init__(self, cell: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.input = LockedDropout(0.3)
        self.rnn = WeightDrop(cell(2, 3), ["weight_hh_l0"], 0.4)
        self.output = LockedDropout(0.2)
        self.decoder = nn.Linear(3, 4)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.rnn(self.input(x), state)
        return self.decoder(self.output(out)), state


class Stacked(nn.Module):
    """Two recurrent layers with torch's own dropout between them, behind word dropout."""

    def __init__(self, cell: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.words = EmbeddingDropout(nn.Embedding(5, 2), 0.2)
        self.rnn = cell(2, 3, num_layers=2, dropout=0.4)
        self.decoder = nn.Linear(3, 4)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.rnn(self.words(tokens))
        return self.decoder(out), state


def mlp() -> Problem:
    layers = [nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 3), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(3, 3))
    return Problem(model, torch.randn(3, 2), torch.tensor([0, 2, 1]), CrossEntropy())


def cnn() -> Problem:
    layers = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Dropout2d(0.4), nn.Conv2d(2, 3, 2), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Dropout2d(0.25), nn.Flatten(), nn.Linear(12, 3))
    return Problem(model, torch.randn(2, 1, 5, 5), torch.tensor([2, 0]), CrossEntropy())


def lstm() -> Problem:
    targets = torch.tensor([[0, 3], [-100, 1], [2, 2]])
    return Problem(Recurrent(), torch.randn(3, 2, 2), targets, CrossEntropy())


def gru() -> Problem:
    tokens, targets = torch.tensor([[0, 3], [4, 3]]), torch.tensor([[1, 2], [0, 3]])
    return Problem(Stacked(), tokens, targets, CrossEntropy())


def transformer() -> Problem:
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.2, batch_first=True)
    targets = torch.tensor([[0, 1, 2], [2, -100, 0]])
    model = nn.Sequential(layer, nn.Linear(4, 3))
    return Problem(model, torch.randn(2, 3, 4), targets, CrossEntropy())


def batch_norm() -> Problem:
    layers = [nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Tanh(), nn.Dropout(0.3), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8, 3), nn.BatchNorm1d(3))
    return Problem(model, torch.randn(4, 1, 3, 3), torch.tensor([2, 0, 1, 1]), CrossEntropy())


PROBLEMS: dict[str, Callable[[], Problem]] = {
    p.__name__: p for p in (mlp, cnn, lstm, gru, transformer, batch_norm)
}


def problem(name: str, loss: str | None = None, seed: int = 0) -> Problem:
    """A fresh problem, the same for the same seed; its tensors are float64."""
    torch.manual_seed(seed)
    made = PROBLEMS[name]()
    inputs = made.inputs.to(D) if made.inputs.is_floating_point() else made.inputs
    made = replace(made, model=made.model.to(D), inputs=inputs)
    return made if loss is None else made.with_loss(loss)


def classify(model: nn.Module, *shape: int, classes: int = 3, seed: int = 0) -> Problem:
    """A classification problem in float64."""
    torch.manual_seed(seed)
    model = model.to(D).train()
    x = torch.randn(*shape, dtype=D)
    with torch.no_grad():
        leading = model(x).shape[:-1]
    return Problem(model, x, torch.randint(classes, leading), CrossEntropy())
