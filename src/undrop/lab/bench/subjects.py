"""The models that are timed. To add one, add a function that returns a :class:`Subject`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import UnknownNameError
from undrop.lab.models import AWDLSTM, GPT, MLP
from undrop.losses import CrossEntropy, Loss
from undrop.registry import Registry

SIZES = ("small", "paper")
_VOCABULARY = 10_000


@dataclass(frozen=True)
class Subject:
    """A model and a batch, for a plain loop and for an objective."""

    model: nn.Module
    plain: Callable[[], Tensor]  # returns the loss by PyTorch's own fastest path, with dropout
    inputs: Any  # for an objective
    targets: Tensor
    loss: Loss
    batch_dim: int = 0


SUBJECTS: Registry[str, Callable[[str], Subject]] = Registry("bench model")
"""What can be timed, by name; each function takes a size, which some ignore."""


def check_named(model: str, size: str) -> None:
    """Refuse an unknown model or size with an :class:`UnknownNameError`."""
    SUBJECTS[model]  # raises for an unknown name
    if size not in SIZES:
        raise UnknownNameError("bench size", size, SIZES)


def subject(model: str, size: str, device: str = "cpu") -> Subject:
    """Return the subject of that name and size on a device, with the same weights each time."""
    check_named(model, size)
    torch.manual_seed(0)
    with torch.device(device):
        return SUBJECTS[model](size)


def _integers(high: int, shape: tuple[int, ...]) -> Tensor:
    """Return random integers below ``high`` on the default device, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(high, shape, generator=generator, device="cpu").to(torch.empty(0).device)


def _language_model(
    model: Any, length: int, batch: int, *, words: int = _VOCABULARY, compiled: bool = False
) -> Subject:
    tokens = _integers(words, (length + 1, batch))
    x, y = tokens[:-1], tokens[1:]

    def plain() -> Tensor:
        logits, _ = model(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    loss = model.loss()
    if compiled:
        model = torch.compile(model)
    return Subject(model, plain, {"tokens": x, "logits": False}, y, loss, batch_dim=1)


def _classifier(model: nn.Module, x: Tensor, classes: int = 10) -> Subject:
    y = _integers(classes, (len(x),))
    return Subject(model, lambda: nn.functional.cross_entropy(model(x), y), x, y, CrossEntropy())


@SUBJECTS.register("awd-lstm")
def awd_lstm(size: str) -> Subject:
    """AWD-LSTM; the paper's size is that of its PTB experiments."""
    if size == "paper":
        return _language_model(AWDLSTM(_VOCABULARY), length=70, batch=20)
    model = AWDLSTM(_VOCABULARY, embedding_size=200, hidden_size=200, layers=2)
    return _language_model(model, length=35, batch=20)


@SUBJECTS.register("transformer")
def transformer(size: str) -> Subject:
    """A causal transformer; the paper's size has the widths of its Transformer-XL."""
    if size == "paper":
        model = GPT(_VOCABULARY, size=410, layers=16, heads=10, context=150)
        return _language_model(model, length=150, batch=8)
    model = GPT(_VOCABULARY, size=256, layers=4, heads=4, context=128)
    return _language_model(model, length=128, batch=8)


@SUBJECTS.register("mlp")
def mlp(size: str) -> Subject:
    """A classifier with two hidden layers."""
    width, batch = (2048, 256) if size == "paper" else (512, 128)
    model = MLP((784, width, width, 10), dropout=0.5)
    return _classifier(model, torch.randn(batch, 784))


def small_mlp(size: str, inputs: int, width: int, batch: int) -> Subject:
    """A classifier so small that the number of calls is most of a step's cost."""
    return _classifier(MLP((inputs, width, width, 10), dropout=0.2), torch.randn(batch, inputs))


SUBJECTS.register("mlp-64")(partial(small_mlp, inputs=287, width=64, batch=32))
SUBJECTS.register("mlp-256")(partial(small_mlp, inputs=784, width=256, batch=64))


@SUBJECTS.register("lstm-100")
def lstm_100(size: str) -> Subject:
    """The language model of the small reproduction: 2×100, 1,000 words, batch 10, DropConnect."""
    model = AWDLSTM(1_000, embedding_size=100, hidden_size=100, layers=2)
    return _language_model(model, length=35, batch=10, words=1_000)


@SUBJECTS.register("convnet")
def convnet(size: str) -> Subject:
    """Two convolutions with max pooling, dropout before the last layer, batch 64."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 49, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )
    return _classifier(model, torch.randn(64, 1, 28, 28))


def gpt(size: str, width: int, compiled: bool = False) -> Subject:
    """A causal transformer of 4 layers, 2,000 words, batch 8; if compiled, so is its dropout step."""
    model = GPT(2_000, size=width, layers=4, heads=4, context=128)
    return _language_model(model, length=128, batch=8, words=2_000, compiled=compiled)


SUBJECTS.register("gpt-128")(partial(gpt, width=128))
SUBJECTS.register("gpt-256")(partial(gpt, width=256))
SUBJECTS.register("gpt-128-compiled")(partial(gpt, width=128, compiled=True))
SUBJECTS.register("gpt-256-compiled")(partial(gpt, width=256, compiled=True))
