"""Dropout layers that torch lacks: with one mask for all time steps, on weights, and on whole words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import OptionError
from undrop.nn.adaptive import AdaptiveEmbedding
from undrop.noise import structured_dropout
from undrop.options import check_probability


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` in which parameters can be replaced; it shares everything else."""
    copy = module.__new__(type(module))
    copy.__dict__ = module.__dict__.copy()
    copy.__dict__["_parameters"] = module._parameters.copy()
    return copy


class LockedDropout(nn.Module):
    """Dropout with one mask for all time steps (variational dropout).

    Args:
        p: the drop probability.
        time_dim: the dimension of the input along which the mask is shared.
    """

    def __init__(self, p: float = 0.5, *, time_dim: int = 0) -> None:
        super().__init__()
        self.p = check_probability("p", p)
        self.time_dim = time_dim

    def forward(self, x: Tensor) -> Tensor:
        """Drop the same features of an example in all time steps."""
        return structured_dropout(
            x,
            self.p,
            shared=(self.time_dim,),
            training=self.training,
            kind="locked",
            mask="shared over time",
        )

    def extra_repr(self) -> str:
        """Return the arguments, for printing."""
        return f"p={self.p}, time_dim={self.time_dim}"


class WeightDrop(nn.Module):
    """DropConnect: dropout on named parameters of any module, with a new mask for each call.

    The wrapped module does not change, and keeps its parameters under their names. Each call runs a
    shallow copy of the module with the dropped weights, so several threads may share the module.

    Args:
        module: the module whose parameters are dropped.
        names: the names of these parameters in the module, e.g. ``["weight_hh_l0"]``.
        p: the drop probability.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], p: float = 0.5) -> None:
        super().__init__()
        parameters = ", ".join(module._parameters) or "none"
        if not names:
            raise OptionError(f"names is empty: choose from {parameters}.")
        if missing := [name for name in names if name not in module._parameters]:
            raise OptionError(
                f"{type(module).__name__} has no parameter {', '.join(missing)}: its own parameters are "
                f"{parameters}."
            )
        self.module = module
        self.names = list(names)
        self.p = check_probability("p", p)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module with dropped weights."""
        copy = _shallow_copy(self.module)
        for name in self.names:
            del copy._parameters[name]
            w = getattr(self.module, name)
            copy.__dict__[name] = structured_dropout(
                w, self.p, training=self.training, kind="weight", mask="per weight", label=name
            )
        if isinstance(copy, nn.RNNBase):
            copy.__dict__["_flat_weights"] = [getattr(copy, n) for n in copy._flat_weights_names]
        return copy(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return the arguments, for printing."""
        return f"names={self.names}, p={self.p}"


class EmbeddingDropout(nn.Module):
    """Dropout of whole words: every occurrence of a dropped word in the batch is zero.

    Args:
        embedding: the embedding whose rows are dropped.
        p: the drop probability.
    """

    def __init__(self, embedding: nn.Embedding | AdaptiveEmbedding, p: float = 0.1) -> None:
        super().__init__()
        self.embedding = embedding
        self.p = check_probability("p", p)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the tokens, with one mask entry per word of the vocabulary."""
        embedded: Tensor = self.embedding(tokens)
        if not self.training or self.p == 0.0:
            return embedded
        # A mask with one entry per word, applied after the lookup, has the same result as dropping rows
        # of the matrix, without a pass over the whole matrix.
        words = self.embedding.num_embeddings
        ones = torch.ones(words, 1, dtype=embedded.dtype, device=embedded.device)
        mask = structured_dropout(ones, self.p, kind="embedding", mask="per word")
        return embedded * mask[tokens]

    def extra_repr(self) -> str:
        """Return the arguments, for printing."""
        return f"p={self.p}"
