"""The validation batches on which a tuner compares its branches."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from undrop.diagnosis.measure.model import shared_examples
from undrop.errors import DataError, OptionError

MAX_BATCHES = 64
"""The largest number of validation batches that a tuner keeps."""
CHECKED_BATCHES = 3
"""The number of training batches that are checked for validation examples."""


def set_aside(
    dataset: Dataset[Any],
    share: float,
    *,
    batch_size: int = 32,
    generator: torch.Generator | None = None,
) -> tuple[Subset[Any], list[Any]]:
    """Set a random share of a training set aside, as validation batches for a tuner.

    Args:
        dataset: a map-style dataset of pairs (input, target).
        share: the share to set aside, e.g. 0.05.
        batch_size: examples per validation batch; the batch size of training is a good choice.
        generator: chooses the examples at random; None uses a fixed seed, so that a resumed run has
            the same split.

    Returns:
        The rest of the training set, and the validation batches.

    Raises:
        OptionError: if the share is not between 0 and 1.
        DataError: if the share makes fewer than two batches.
    """
    if not 0.0 < share < 1.0:
        raise OptionError(f"the share to set aside must lie between 0 and 1, got {share!r}.")
    if not isinstance(dataset, Sized):
        raise DataError(
            f"{type(dataset).__name__} has no length, so no share of it can be set aside: pass "
            "your own validation batches."
        )
    total = len(dataset)
    count = round(share * total)
    if count < 2 * batch_size:
        raise DataError(
            f"{share:g} of {total} examples make fewer than two batches of {batch_size}: set more "
            "aside or make batch_size smaller."
        )
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    order = torch.randperm(total, generator=generator).tolist()
    loader = DataLoader(Subset(dataset, order[:count]), batch_size, drop_last=True)
    return Subset(dataset, sorted(order[count:])), list(loader)


class Validation:
    """Validation batches, which the trials of a tuner use in turn.

    Args:
        batches: pairs (inputs, targets); the first 64 are kept.

    Raises:
        DataError: if there are fewer than two batches, or a batch is not a pair.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = _collect_pairs(batches)
        self.position = 0
        self._checked = 0

    def next(self, count: int) -> list[tuple[Any, Any]]:
        """Return the next batches: ``count`` of them, or each once if there are fewer."""
        n = len(self.batches)
        chosen = [self.batches[(self.position + i) % n] for i in range(min(count, n))]
        self.position += len(chosen)
        return chosen

    def check_unseen(self, inputs: Any, batch_dim: int) -> None:
        """Check that training does not see the validation examples; only the first batches are checked.

        Raises:
            DataError: if most examples of the training batch are also validation examples, because p
                would be tuned on examples that the model memorizes.
        """
        if self._checked >= CHECKED_BATCHES:
            return
        self._checked += 1
        shared, total = shared_examples(inputs, (x for x, _ in self.batches), batch_dim)
        if total and shared > total // 2:
            raise DataError(
                f"{shared} of {total} examples of a training batch are also in the validation data: "
                "tune on examples that training does not see, e.g. with undrop.tuning.set_aside."
            )


def _collect_pairs(batches: Iterable[Any]) -> list[tuple[Any, Any]]:
    if isinstance(batches, Tensor | dict | str) or not isinstance(batches, Iterable):
        raise DataError(
            "validation must be an iterable of pairs (inputs, targets) or a share of the training set "
            f"such as 0.05, got {type(batches).__name__}."
        )
    pairs: list[tuple[Any, Any]] = []
    for pair in batches:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(
                f"each validation batch must be a pair (inputs, targets), got {type(pair).__name__}."
            )
        pairs.append((pair[0], pair[1]))
        if len(pairs) == MAX_BATCHES:
            break
    if len(pairs) < 2:
        count = "only one validation batch" if pairs else "no validation data"
        raise DataError(
            f"there is {count}: a tuner needs at least two batches that training does not see, e.g. "
            "from undrop.tuning.set_aside."
        )
    return pairs
