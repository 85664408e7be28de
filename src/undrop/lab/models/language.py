"""What all language models share: one way to be called, and the loss that fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from undrop.errors import OptionError
from undrop.lab.models.heads import LinearHead
from undrop.lab.models.state import State, tensors
from undrop.losses import Loss
from undrop.nn.adaptive import AdaptiveHead
from undrop.options import check_int
from undrop.registry import Registry

__all__ = ["MODELS", "LanguageModel"]


class LanguageModel(nn.Module, ABC):
    """A model of the next word, called on windows of text with the time first.

    A subclass says how tokens become features, and which embedding the head may share.

    Args:
        vocab_size: the number of words.
        size: the number of features that the head takes.
        tied: whether the head uses the embedding's matrix.
        cutoffs: the first word of each tail of an adaptive softmax; none for a plain one.
        bias: whether a plain head has a bias.
    """

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
                f"tied must be True for an adaptive softmax (cutoffs={list(cutoffs)}), whose rows "
                "are the embedding's, got False."
            )
        self.head = (
            AdaptiveHead(vocab_size, cutoffs=cutoffs)
            if cutoffs
            else LinearHead(vocab_size, size, tied=tied, bias=bias)
        )

    @abstractmethod
    def features(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Features (T, B, d) of tokens (T, B), and the state after the last of them."""

    @abstractmethod
    def table(self) -> Any:
        """The embedding that a tied head shares."""

    def forward(
        self, tokens: Tensor, state: State | None = None, *, logits: bool = True
    ) -> tuple[Tensor, State]:
        """Read a window of text.

        Args:
            tokens: word numbers (T, B), time first.
            state: what the call on the window before returned; None at the beginning of a text. It
                comes with its history: see :func:`undrop.nn.detach`.
            logits: whether to return logits (T, B, V), or else the features (T, B, d) that
                :meth:`loss` takes without ever holding all logits at once.

        Returns:
            The output at each token, which tells of the *next* one, and the new state.
        """
        _check(tokens, state)
        features, state = self.features(tokens, state)
        return (self.head(features, self.table()) if logits else features), state

    def loss(self, *, label_smoothing: float = 0.0) -> Loss:
        """The mean cross-entropy over (T, B) targets that takes the features as its output.

        It holds this model's parameters themselves: make it once and use it at every step.

        Raises:
            OptionError: if the model's head has no label smoothing.
        """
        if label_smoothing and not isinstance(self.head, LinearHead):
            raise OptionError(
                f"the adaptive softmax of {type(self).__name__} has no label smoothing: set "
                "model.cutoffs = [], or train.label_smoothing = 0."
            )
        smoothed = {"label_smoothing": label_smoothing} if label_smoothing else {}
        loss: Loss = self.head.loss(self.table(), **smoothed)
        return loss


MODELS: Registry[str, type[LanguageModel]] = Registry("model")
"""The language models by name."""


def _check(tokens: Tensor, state: State | None) -> None:
    if tokens.dim() != 2 or tokens.numel() == 0 or tokens.is_floating_point():
        raise OptionError(
            "tokens must be a non-empty tensor (time, batch) of whole numbers, got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}."
        )
    for tensor in tensors(state or ()):
        if tensor.shape[1] != tokens.shape[1]:
            raise OptionError(
                f"state must carry as many texts as there are in tokens, {tokens.shape[1]}, got "
                f"{tensor.shape[1]}: pass state=None to begin anew."
            )
