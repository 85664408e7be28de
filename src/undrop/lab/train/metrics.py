"""What a run measures: losses on whole splits, means over steps, and time that survives a restart."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from undrop.errors import NonFiniteError
from undrop.lab.corpora.batching import IGNORED, evaluation_windows
from undrop.lab.corpora.corpus import Tokens
from undrop.lab.models import LanguageModel
from undrop.lab.train.environment import World

_LARGEST = 700.0  # exp of anything larger overflows a float


def perplexity(loss: float) -> float:
    """Return exp(ℓ), kept finite."""
    return math.exp(min(loss, _LARGEST))


@torch.no_grad()
def mean_loss(
    model: LanguageModel,
    tokens: Tokens,
    *,
    batch_size: int,
    length: int,
    world: World | None = None,
    between: Callable[[], None] = lambda: None,
) -> float:
    """Compute the mean cross-entropy over every token of a split but the first, without noise.

    The state carries over from window to window.

    Args:
        model: a language model; its mode is restored.
        tokens: the split.
        batch_size: the number of streams to read in parallel.
        length: the number of steps per window.
        world: the processes that share the streams.
        between: called after each window; it may raise to stop the evaluation.

    Raises:
        NonFiniteError: if the loss is infinite or NaN.
    """
    world = world or World(device=next(model.parameters()).device)
    columns = world.share(batch_size)
    loss, state = model.loss(), None
    total = count = 0.0
    training = model.training
    model.eval()
    try:
        for window in evaluation_windows(tokens, batch_size, length):
            inputs, targets = window.inputs[:, columns], window.targets[:, columns]
            counted = int((targets != IGNORED).sum())
            if inputs.numel() == 0 or counted == 0:
                continue
            features, state = model(inputs.to(world.device), state, logits=False)
            value = loss.value(features, targets.to(world.device))
            total, count = total + float(value) * counted, count + counted
            between()
    finally:
        model.train(training)
    total, count = world.sums([total, count])
    if not math.isfinite(total):
        raise NonFiniteError("the evaluation loss is not finite")
    return total / count


class Means:
    """Weighted means of named values."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0

    def add(self, values: Mapping[str, float], weight: float) -> None:
        """Add one set of values."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * value
        self._weight += weight

    def means(self, world: World) -> dict[str, float]:
        """Return the means over all processes."""
        if not self._weight:
            return {}
        sums = world.sums([*self._sums.values(), self._weight])
        return {name: total / sums[-1] for name, total in zip(self._sums, sums, strict=False)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {"sums": dict(self._sums), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        self._sums, self._weight = dict(state["sums"]), state["weight"]


class Clock:
    """Seconds of work on a run, summed over the processes that resumed it one after the other."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds so far."""
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return self._seconds + running

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time that the block takes."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._seconds, self._since = self.seconds, None

    def start_from(self, seconds: float) -> None:
        """Continue from the seconds of an earlier process."""
        self._seconds = seconds
