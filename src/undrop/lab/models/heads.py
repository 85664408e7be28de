"""From features to words: one softmax over the vocabulary, tied to the embedding or not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrop.losses import LinearCrossEntropy, Loss

__all__ = ["LinearHead"]


class LinearHead(nn.Module):
    """The scores of all words, ``h Wᵀ + b``.

    A tied head has no W: it is handed the embedding at each call and uses its matrix (Press & Wolf
    2017), so that one parameter has one owner and one name in ``state_dict``.

    Args:
        vocab_size: the number of words.
        size: the number of features.
        tied: whether W is the embedding's matrix.
        bias: whether there is a b.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, vocab_size: int, size: int, *, tied: bool = True, bias: bool = True) -> None:
        super().__init__()
        weight = None if tied else nn.Parameter(torch.empty(vocab_size, size))
        self.register_parameter("weight", weight)
        if weight is not None:
            nn.init.uniform_(weight, -0.1, 0.1)
        self.register_parameter("bias", nn.Parameter(torch.zeros(vocab_size)) if bias else None)

    def forward(self, features: Tensor, embedding: nn.Embedding) -> Tensor:
        """Logits (…, V) of features (…, d)."""
        return F.linear(features, self._weight(embedding), self.bias)

    def loss(self, embedding: nn.Embedding, *, label_smoothing: float = 0.0) -> Loss:
        """The cross-entropy that takes this head's features."""
        weight = self._weight(embedding)
        return LinearCrossEntropy(weight, self.bias, label_smoothing=label_smoothing)

    def _weight(self, embedding: nn.Embedding) -> Tensor:
        return embedding.weight if self.weight is None else self.weight
