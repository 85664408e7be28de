"""The base class of the language models: its state, output layer, call and loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from undrop.errors import OptionError
from undrop.losses import LinearCrossEntropy, Loss
from undrop.nn.adaptive import AdaptiveHead
from undrop.options import check_int
from undrop.registry import Registry

State: TypeAlias = tuple[Any, ...]
"""The state that a model carries between windows: tensors (or tuples of them) of shape (…, B, size)."""


def detach(state: State) -> State:
    """Return the state without its graph, to truncate back-propagation between windows."""
    detached: State = tree_map_only(Tensor, Tensor.detach, state)
    return detached


class LinearHead(nn.Module):
    """The logits of all words, ``h Wᵀ + b``.

    A tied head uses the embedding's matrix as W (Press & Wolf 2017). It does not store W: each call
    passes the embedding, so that each parameter has one owner and one name in ``state_dict``.

    Args:
        vocab_size: the number of words.
        size: the number of features.
        tied: whether W is the embedding's matrix.
        bias: whether to add b.
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
        """Return the logits (…, V) of features (…, d)."""
        return F.linear(features, self._weight(embedding), self.bias)

    def loss(self, embedding: nn.Embedding, *, label_smoothing: float = 0.0) -> Loss:
        """Return the cross-entropy as a loss that takes the features, and applies this head."""
        weight = self._weight(embedding)
        return LinearCrossEntropy(weight, self.bias, label_smoothing=label_smoothing)

    def _weight(self, embedding: nn.Embedding) -> Tensor:
        return embedding.weight if self.weight is None else self.weight


class LanguageModel(nn.Module, ABC):
    """A model that predicts the next word, called on windows of text with the time first.

    A subclass has an ``embedding``, and computes the features of tokens.

    Args:
        vocab_size: the number of words.
        size: the number of features that the head takes.
        tied: whether the head uses the embedding's matrix.
        cutoffs: the index of the first word of each tail cluster of an adaptive softmax; empty for a
            full softmax.
        bias: whether the head of a full softmax has a bias.
    """

    embedding: Any
    context: int | None = None
    """The largest number of tokens in a window; None if there is no limit."""

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        tied: bool = True,
        cutoffs: Sequence[int] = (),
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.vocab_size = check_int("vocab_size", vocab_size)
        if cutoffs and not tied:
            raise OptionError(
                f"tied must be True for an adaptive softmax (cutoffs={list(cutoffs)}), which uses the "
                "rows of the embedding, got False."
            )
        self.head = (
            AdaptiveHead(vocab_size, cutoffs=cutoffs)
            if cutoffs
            else LinearHead(vocab_size, size, tied=tied, bias=bias)
        )

    @abstractmethod
    def features(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the features (T, B, d) of tokens (T, B), and the state after the last token."""

    def shared_embedding(self) -> Any:
        """Return the embedding whose matrix a tied head uses."""
        return self.embedding

    def forward(
        self, tokens: Tensor, state: State | None = None, *, logits: bool = True
    ) -> tuple[Tensor, State]:
        """Read a window of text.

        Args:
            tokens: word numbers (T, B), time first.
            state: the state that the call on the previous window returned; None at the beginning of a
                text. The state keeps its graph unless you :func:`detach` it.
            logits: whether to return the logits (T, B, V). If False, the output is the features
                (T, B, d) for :meth:`loss`, which computes the logits in chunks.

        Returns:
            The output at each token, which predicts the *next* one, and the new state.
        """
        _check_inputs(tokens, state)
        features, state = self.features(tokens, state)
        return (self.head(features, self.shared_embedding()) if logits else features), state

    def loss(self, *, label_smoothing: float = 0.0) -> Loss:
        """Return the mean cross-entropy over (T, B) targets, as a loss that takes the features.

        The loss refers to the parameters of this model, so one loss serves all steps.

        Raises:
            OptionError: if the model's head does not support label smoothing.
        """
        if label_smoothing and not isinstance(self.head, LinearHead):
            raise OptionError(
                f"the adaptive softmax of {type(self).__name__} does not support label smoothing: "
                "set model.cutoffs = [], or train.label_smoothing = 0."
            )
        smoothed = {"label_smoothing": label_smoothing} if label_smoothing else {}
        loss: Loss = self.head.loss(self.shared_embedding(), **smoothed)
        return loss


MODELS: Registry[str, type[LanguageModel]] = Registry("model")
"""The language models, by name."""


def _check_inputs(tokens: Tensor, state: State | None) -> None:
    if tokens.dim() != 2 or tokens.numel() == 0 or tokens.is_floating_point():
        raise OptionError(
            "tokens must be a non-empty tensor (time, batch) of whole numbers, got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}."
        )
    for tensor in tree_leaves(state or ()):
        if tensor.shape[1] != tokens.shape[1]:
            raise OptionError(
                f"state must have the batch size of tokens, {tokens.shape[1]}, got "
                f"{tensor.shape[1]}: pass state=None to start a new text."
            )
