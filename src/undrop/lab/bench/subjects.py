"""The models that are timed. To add one, add a function that returns a :class:`Subject`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import UnknownNameError
from undrop.lab.models import AWDLSTM, GPT, MLP
from undrop.losses import CrossEntropy, Loss
from undrop.registry import Registry

__all__ = ["SIZES", "SUBJECTS", "Subject", "check_named", "subject"]

SIZES = ("small", "paper")
_VOCABULARY = 10_000


@dataclass(frozen=True)
class Subject:
    """A model and a batch, for a plain loop and for an objective."""

    model: nn.Module
    plain: Callable[[], Tensor]
    """Returns the loss by PyTorch's own best path, with the model's dropout."""
    inputs: Any
    """The inputs for an objective."""
    targets: Tensor
    loss: Loss
    batch_dim: int = 0

    @property
    def batched(self) -> dict[str, Any]:
        """The arguments of an objective that depend on the subject."""
        return {"loss": self.loss, "batch_dim": self.batch_dim}


SUBJECTS: Registry[str, Callable[[str], Subject]] = Registry("bench model")
"""What can be timed, by name; each function takes a size."""


def check_named(model: str, size: str) -> None:
    """Refuse an unknown model or size.

    Raises:
        UnknownNameError: with the names there are.
    """
    SUBJECTS[model]  # raises if there is none
    if size not in SIZES:
        raise UnknownNameError("bench size", size, SIZES)


def subject(model: str, size: str) -> Subject:
    """Return the subject of that name and size, the same for every caller."""
    check_named(model, size)
    torch.manual_seed(0)
    return SUBJECTS[model](size)


def _language_model(model: Any, length: int, batch: int) -> Subject:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(_VOCABULARY, (length + 1, batch), generator=generator)
    x, y = tokens[:-1], tokens[1:]

    def plain() -> Tensor:
        logits, _ = model(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    return Subject(model, plain, {"tokens": x, "logits": False}, y, model.loss(), batch_dim=1)


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
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 784, generator=generator)
    y = torch.randint(10, (batch,), generator=generator)
    return Subject(model, lambda: nn.functional.cross_entropy(model(x), y), x, y, CrossEntropy())
