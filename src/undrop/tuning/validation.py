"""The batches that a tuner measures on, which training must not see."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from undrop.diagnosis.measure.model import shared_examples
from undrop.errors import DataError, OptionError

LIMIT = 64
"""The most batches that a tuner keeps."""
COMPARED = 3
"""The number of training batches that are compared with the validation batches."""


def set_aside(
    dataset: Dataset[Any],
    share: float,
    *,
    batch_size: int = 32,
    generator: torch.Generator | None = None,
) -> tuple[Subset[Any], list[Any]]:
    """Split a random share off a training set, for a tuner to measure on.

    Args:
        dataset: a map-style dataset of pairs (input, target).
        share: the share to set aside, e.g. 0.05.
        batch_size: examples per validation batch; the batch size of training is a good choice.
        generator: decides which examples; None takes a fixed seed, so that a resumed run has the
            same split.

    Returns:
        What is left to train on, and the validation batches.

    Raises:
        OptionError: if the share is not between 0 and 1.
        DataError: if it makes fewer than two batches.
    """
    if not 0.0 < share < 1.0:
        raise OptionError(f"the share to set aside must lie between 0 and 1, got {share!r}.")
    if not isinstance(dataset, Sized):
        raise DataError(
            f"{type(dataset).__name__} has no length, so no share of it can be set aside: pass "
            "your own validation batches."
        )
    held, n = round(share * len(dataset)), len(dataset)
    if held < 2 * batch_size:
        raise DataError(
            f"{share:g} of {n} examples make fewer than two batches of {batch_size}: set more aside "
            "or make batch_size smaller."
        )
    random = torch.Generator().manual_seed(0) if generator is None else generator
    order = torch.randperm(n, generator=random).tolist()
    loader = DataLoader(Subset(dataset, order[:held]), batch_size, drop_last=True)
    return Subset(dataset, sorted(order[held:])), list(loader)


class Validation:
    """Validation batches, taken in turn.

    Args:
        batches: pairs (inputs, targets); at most 64 of them are kept.

    Raises:
        DataError: if there are fewer than two, or one is not a pair.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = _collected(batches)
        self.position = 0
        self._compared = 0

    def next(self, count: int) -> list[tuple[Any, Any]]:
        """Return the next batches, each at most once."""
        n = len(self.batches)
        taken = [self.batches[(self.position + i) % n] for i in range(min(count, n))]
        self.position += len(taken)
        return taken

    def compare(self, inputs: Any, batch_dim: int) -> None:
        """Raise an error if most examples of a training batch are also validation examples.

        Raises:
            DataError: if so, because p would be tuned on examples that the model memorizes.
        """
        if self._compared >= COMPARED:
            return
        self._compared += 1
        known, total = shared_examples(inputs, (x for x, _ in self.batches), batch_dim)
        if total and known > total // 2:
            raise DataError(
                f"{known} of {total} examples of a training batch are in the validation data too: "
                "tune on examples that training does not see, e.g. with undrop.tuning.set_aside."
            )


def _collected(batches: Iterable[Any]) -> list[tuple[Any, Any]]:
    if isinstance(batches, Tensor | dict | str) or not isinstance(batches, Iterable):
        raise DataError(
            "validation must be an iterable of pairs (inputs, targets) or a share of the training set "
            f"such as 0.05, got {type(batches).__name__}."
        )
    found: list[tuple[Any, Any]] = []
    for pair in batches:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(
                f"each validation batch must be a pair (inputs, targets), got {type(pair).__name__}."
            )
        found.append((pair[0], pair[1]))
        if len(found) == LIMIT:
            break
    if len(found) < 2:
        count = "only one validation batch" if found else "no validation data"
        raise DataError(
            f"there is {count}: a tuner needs at least two batches that training does not see, e.g. by "
            "undrop.tuning.set_aside."
        )
    return found
