"""The models that are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import UnknownNameError
from undrop.losses import CrossEntropy, Loss

__all__ = ["SIZES", "SUBJECTS", "Subject", "check_named", "subject"]

SIZES = ("small", "paper")
_VOCABULARY = 10_000


@dataclass(frozen=True)
class Subject:
    """A model and a batch, as a plain loop would use them and as an objective does best."""

    model: nn.Module
    plain: Callable[[], Tensor]
    """The loss by PyTorch's own best path, with the model's dropout."""
    inputs: Any
    """For an objective."""
    targets: Tensor
    loss: Loss
    batch_dim: int


def _language_model(model: Any, length: int, batch: int) -> Subject:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(_VOCABULARY, (length + 1, batch), generator=generator)
    x, y = tokens[:-1], tokens[1:]

    def plain() -> Tensor:
        logits, _ = model(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    return Subject(model, plain, {"tokens": x, "logits": False}, y, model.loss(), batch_dim=1)


def _awd_lstm(size: str) -> Subject:
    from undrop.lab.models import AWDLSTM

    if size == "paper":
        return _language_model(AWDLSTM(_VOCABULARY), length=70, batch=20)
    model = AWDLSTM(_VOCABULARY, embedding_size=200, hidden_size=200, layers=2)
    return _language_model(model, length=35, batch=20)


def _transformer(size: str) -> Subject:
    from undrop.lab.models import GPT

    if size == "paper":  # the widths of the paper's Transformer-XL
        model = GPT(_VOCABULARY, size=410, layers=16, heads=10, context=150)
        return _language_model(model, length=150, batch=8)
    model = GPT(_VOCABULARY, size=256, layers=4, heads=4, context=128)
    return _language_model(model, length=128, batch=8)


def _mlp(size: str) -> Subject:
    from undrop.lab.models import MLP

    width, batch = (2048, 256) if size == "paper" else (512, 128)
    model = MLP((784, width, width, 10), dropout=0.5)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 784, generator=generator)
    y = torch.randint(10, (batch,), generator=generator)
    return Subject(
        model, lambda: nn.functional.cross_entropy(model(x), y), x, y, CrossEntropy(), batch_dim=0
    )


SUBJECTS: dict[str, Callable[[str], Subject]] = {
    "awd-lstm": _awd_lstm,
    "transformer": _transformer,
    "mlp": _mlp,
}
"""What can be timed, by name; each takes a size."""


def check_named(model: str, size: str) -> None:
    """Refuse a name of no model or size.

    Raises:
        UnknownNameError: listing the names there are.
    """
    if model not in SUBJECTS:
        raise UnknownNameError("bench model", model, SUBJECTS)
    if size not in SIZES:
        raise UnknownNameError("bench size", size, SIZES)


def subject(model: str, size: str) -> Subject:
    """The model of that name and size with a batch to run it on, the same for every caller."""
    torch.manual_seed(0)
    return SUBJECTS[model](size)
