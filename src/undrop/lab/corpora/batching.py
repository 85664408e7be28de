"""Windows of tokens for training and evaluation, as AWD-LSTM cuts them.

Tokens are cut into B contiguous streams that are read in parallel: a window is ``(T, B)``, time first,
and the next window starts where it ended, so that a recurrent state carries over.
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
"""The target of a position that does not count, which torch's losses ignore by default."""

_HALF = 0.05  # the probability of a window of half the length
_SPREAD = 5.0  # the standard deviation of a window's length
_SHORTEST = 5


class Window(NamedTuple):
    """The tokens of one step, (T, B) int64."""

    inputs: Tensor
    targets: Tensor  # the token after each input
    scale: float
    """T / bptt, the factor of the learning rate: the loss is a mean, so a short window would
    otherwise count as much as a long one."""


class TrainingWindows:
    """Epochs of windows over B contiguous streams; the position can be saved and restored.

    Each loop ``for window in windows`` runs to the end of an epoch; the next one starts at the
    beginning. The tokens that do not fill the streams evenly (fewer than B) are left out. A window has
    the length ``bptt``, or with a ``generator`` a random length as in AWD-LSTM: drawn from
    N(bptt, 5²), or with a probability of 5 % from N(bptt/2, 5²), rounded down, and at least 5. The
    last window of an epoch takes the rest.

    ``state_dict`` holds the position and the generator's state. If it is saved between two windows and
    loaded later, the epoch continues with exactly the same windows.

    Args:
        tokens: a split's tokens.
        batch_size: the number of streams, over all shards.
        bptt: the number of time steps per window.
        generator: the source of random lengths; None for windows of fixed length.
        shard: (rank, number of ranks): use only this rank's equal share of the streams. Ranks with
            equal generators have windows of equal length.
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
        _check(tokens, batch_size, bptt)
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
        """The number of time steps of the epoch so far."""

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
        half = torch.rand((), generator=self._generator).item() < _HALF
        deviation = _SPREAD * torch.randn((), generator=self._generator).item()
        return max(_SHORTEST, int((self.bptt / 2 if half else self.bptt) + deviation))

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the generator's state, if there is a generator."""
        generator = None if self._generator is None else self._generator.get_state()
        return {"position": self.position, "generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved position.

        Raises:
            OptionError: if it belongs to other tokens or another kind of windows.
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
    """Yield the windows of a whole split: every token but the first is a target exactly once.

    The streams have the same length. Targets of :data:`IGNORED` fill the end of the last stream, so
    weight the mean loss of a window by the number of its other targets.

    Args:
        tokens: a split's tokens.
        batch_size: the number of streams; with 1 every prediction sees the whole text before it.
        bptt: the number of time steps per window.
    """
    _check(tokens, batch_size, bptt)
    predictions = len(tokens) - 1
    time_steps = -(-predictions // batch_size)
    starts = time_steps * np.arange(batch_size)
    for first in range(0, time_steps, bptt):
        length = min(bptt, time_steps - first)
        places = starts[:, None] + np.arange(first, first + length)
        inside = places < predictions
        places[~inside] = 0
        targets = np.where(inside, tokens[places + 1].astype(np.int64), IGNORED)
        yield Window(_to_tensor(tokens[places]), _to_tensor(targets), length / bptt)


def _check(tokens: Tokens, batch_size: int, bptt: int) -> None:
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
