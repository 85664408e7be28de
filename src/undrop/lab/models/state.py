"""What a language model carries from one window of text to the next.

A state is a tuple of tensors, or of such tuples, with the batch in dimension 1 of every tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["State", "detach", "tensors"]

State: TypeAlias = tuple[Any, ...]


def detach(state: State) -> State:
    """The same values without their history: truncates back-propagation between two windows."""
    return tuple(part.detach() if isinstance(part, Tensor) else detach(part) for part in state)


def tensors(state: State) -> Iterator[Tensor]:
    """All tensors of a state, in order."""
    for part in state:
        if isinstance(part, Tensor):
            yield part
        else:
            yield from tensors(part)
