"""The batches to measure on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrop.errors import DataError
from undrop.intercept import tensors_in


class NumberedBatch(NamedTuple):
    """One batch as the user gave it, with its place among the others."""

    number: int
    inputs: Any
    targets: Any


def collect(batches: Iterable[Any], limit: int, *, name: str = "batches") -> list[NumberedBatch]:
    """Return the first ``limit`` batches, or all if there are fewer.

    Args:
        batches: pairs (inputs, targets).
        limit: the largest number to take.
        name: the argument that holds them, for errors.

    Raises:
        DataError: if there is none, or one is not a pair.
    """
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise DataError(
            f"{name} must be an iterable of pairs (inputs, targets), such as a DataLoader, got "
            f"{type(batches).__name__}: put a single batch into a list, [(inputs, targets)]."
        )
    found = []
    for number, pair in enumerate(islice(batches, limit)):
        if isinstance(pair, Mapping) and "labels" in pair:
            pair = (pair, None)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            got = f"{len(pair)} things" if isinstance(pair, tuple | list) else type(pair).__name__
            raise DataError(
                f"each of the {name} must be a pair (inputs, targets), got {got} for batch {number}: "
                "inputs may be a tensor, a tuple (positional) or a dict (keyword arguments)."
            )
        found.append(NumberedBatch(number, *pair))
    if not found:
        raise DataError(
            f"there are no {name}: pass at least one pair (inputs, targets); a generator that has been "
            "used up is empty."
        )
    return found


def shared_examples(inputs: Any, held: Iterable[Any], batch_dim: int) -> tuple[int, int]:
    """How many examples of a training batch are among held-out ones to the bit, and of how many.

    Args:
        inputs: of the training batch.
        held: the inputs of each held-out batch.
        batch_dim: the dimension that counts examples.
    """
    mine = _fingerprints(inputs, batch_dim)
    others = {f for x in held for f in _fingerprints(x, batch_dim)}
    return sum(f in others for f in mine), len(mine)


def _fingerprints(inputs: Any, dim: int) -> list[bytes]:
    """One for each example of the first tensor."""
    tensors: Sequence[Tensor] = [t for t in tensors_in(inputs) if t.dim() > dim]
    if not tensors:
        return []
    rows = tensors[0].detach().cpu().movedim(dim, 0)
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows if row.dim()]
