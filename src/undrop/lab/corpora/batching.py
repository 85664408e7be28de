"""Windows of tokens for training and evaluation, as AWD-LSTM cuts them.

Tokens are cut into B contiguous streams that are read in parallel. A window is ``(T, B)``, time first.
Each window starts where the previous one ended, so that a recurrent state carries over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from undrop.errors import OptionError
from undrop.lab.corpora.corpus import Tokens

IGNORED = -100
"""The target of a padded position; torch's losses ignore it by default."""

_HALF_PROBABILITY = 0.05  # of a window of half the length
_LENGTH_STD = 5.0  # the standard deviation of a window's length
_MIN_LENGTH = 5


class Window(NamedTuple):
    """The inputs and targets of one step, both (T, B) int64."""

    inputs: Tensor
    targets: Tensor  # the token after each input
    scale: float
    """T / bptt, a factor for the learning rate. The loss is a mean, so without this factor a short
    window would count as much as a long one."""


class TrainingWindows:
    """Epochs of windows over B contiguous streams; the position can be saved and restored.

    A loop ``for window in windows`` runs to the end of an epoch; the next loop starts a new epoch. The
    last tokens, fewer than B, are omitted if they do not fill the streams evenly. A window has the
    length ``bptt``. With a ``generator``, it has a random length as in AWD-LSTM: drawn from
    N(bptt, 5²), or with a probability of 5 % from N(bptt/2, 5²), rounded down, and at least 5. The
    last window of an epoch has the remaining length.

    ``state_dict`` holds the position and the generator's state. If you save it between two windows and
    load it later, the epoch continues with exactly the same windows.

    Args:
        tokens: a split's tokens.
        batch_size: the number of streams of all shards together.
        bptt: the number of time steps per window.
        generator: the source of random lengths; None for windows of fixed length.
        shard: (rank, number of ranks): use only this rank's share of the streams; all ranks have equally
            many. Ranks with equal generators have windows of equal length.
    """

    def __init__(
        self,
        tokens: Tokens,
        batch_size: int,
        bptt: int,
        *,
        generator: torch.Generator | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        _check_sizes(tokens, batch_size, bptt)
        rank, ranks = shard
        if not 0 <= rank < ranks or batch_size % ranks:
            raise OptionError(
                f"rank {rank} of {ranks} can't have a share of {batch_size} streams: the batch size "
                "must be a multiple of the number of ranks, and the rank must be below that number."
            )
        time_steps = len(tokens) // batch_size
        share = batch_size // ranks
        streams = tokens[: time_steps * batch_size].reshape(batch_size, time_steps)
        self._streams = streams[rank * share : (rank + 1) * share]
        self.bptt = bptt
        self._generator = generator
        self.position = 0
        """The number of time steps of this epoch so far."""

    @property
    def steps(self) -> int:
        """The number of predictions per stream in an epoch."""
        return int(self._streams.shape[1]) - 1

    def __iter__(self) -> Iterator[Window]:
        while self.position < self.steps:
            start = self.position
            self.position = min(start + self._length(), self.steps)
            yield self.window(start, self.position)
        self.position = 0

    def window(self, start: int, end: int) -> Window:
        """Return the time steps from ``start`` to ``end``, or to the end of the streams."""
        end = min(end, self.steps)
        piece = self._streams[:, start : end + 1]
        inputs, targets = _to_tensor(piece[:, :-1]), _to_tensor(piece[:, 1:])
        return Window(inputs, targets, (end - start) / self.bptt)

    def _length(self) -> int:
        if self._generator is None:
            return self.bptt
        half = torch.rand((), generator=self._generator).item() < _HALF_PROBABILITY
        deviation = _LENGTH_STD * torch.randn((), generator=self._generator).item()
        return max(_MIN_LENGTH, int((self.bptt / 2 if half else self.bptt) + deviation))

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the generator's state, if there is a generator."""
        generator = None if self._generator is None else self._generator.get_state()
        return {"position": self.position, "generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position.

        Raises:
            OptionError: if the state belongs to other tokens or another kind of windows.
        """
        position, generator = int(state["position"]), state["generator"]
        if (generator is None) != (self._generator is None) or not 0 <= position <= self.steps:
            raise OptionError(
                f"a saved position must belong to the same tokens and kind of windows, got step "
                f"{position} of {self.steps}, with{'out' if generator is None else ''} a generator."
            )
        self.position = position
        if self._generator is not None:
            self._generator.set_state(generator)


def evaluation_windows(tokens: Tokens, batch_size: int, bptt: int) -> Iterator[Window]:
    """Yield the windows of a whole split, in which every token but the first is a target once.

    The streams have the same length: targets of :data:`IGNORED` fill the end of the last streams. So
    weight the mean loss of a window by the number of its targets that are not ignored.

    Args:
        tokens: a split's tokens.
        batch_size: the number of streams; with 1, every prediction sees all of the text before it.
        bptt: the number of time steps per window.
    """
    _check_sizes(tokens, batch_size, bptt)
    predictions = len(tokens) - 1
    time_steps = -(-predictions // batch_size)
    starts = time_steps * np.arange(batch_size)
    for first in range(0, time_steps, bptt):
        length = min(bptt, time_steps - first)
        indices = starts[:, None] + np.arange(first, first + length)
        inside = indices < predictions
        indices[~inside] = 0
        targets = np.where(inside, tokens[indices + 1].astype(np.int64), IGNORED)
        yield Window(_to_tensor(tokens[indices]), _to_tensor(targets), length / bptt)


def _check_sizes(tokens: Tokens, batch_size: int, bptt: int) -> None:
    if batch_size < 1 or bptt < 1:
        raise OptionError(f"batch_size and bptt must be at least 1, got {batch_size} and {bptt}.")
    if len(tokens) < 2 * batch_size:
        raise OptionError(
            f"{len(tokens)} tokens are too few for {batch_size} streams of at least 2: use a "
            "smaller batch size or more tokens."
        )


def _to_tensor(streams: NDArray[Any]) -> Tensor:
    """Copy (B, T) tokens of any integer type to a (T, B) tensor."""
    return torch.from_numpy(np.ascontiguousarray(streams.T, dtype=np.int64))
