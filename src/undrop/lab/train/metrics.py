"""The measurements of a run: losses on whole splits, means over steps, and seconds of work."""

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

_MAX_LOSS = 700.0  # exp overflows above 709


def perplexity(loss: float) -> float:
    """Return exp(ℓ), kept finite."""
    return math.exp(min(loss, _MAX_LOSS))


@torch.no_grad()
def mean_loss(
    model: LanguageModel,
    tokens: Tokens,
    *,
    batch_size: int,
    length: int,
    world: World | None = None,
    after_window: Callable[[], None] = lambda: None,
) -> float:
    """Compute the mean cross-entropy over all tokens of a split except the first, without noise.

    The hidden state carries over from window to window.

    Args:
        model: a language model; its mode is restored.
        tokens: the split.
        batch_size: the number of streams to read in parallel.
        length: the number of time steps per window.
        world: the processes that share the streams.
        after_window: called after each window; it can raise an error to stop the evaluation.

    Raises:
        NonFiniteError: if the loss is infinite or NaN.
    """
    world = world or World(device=next(model.parameters()).device)
    columns = world.columns(batch_size)
    loss, state = model.loss(), None
    total = count = 0.0
    training = model.training
    model.eval()
    try:
        for window in evaluation_windows(tokens, batch_size, length):
            inputs, targets = window.inputs[:, columns], window.targets[:, columns]
            tokens_in_window = int((targets != IGNORED).sum())
            if tokens_in_window == 0:
                continue
            features, state = model(inputs.to(world.device), state, logits=False)
            value = loss.value(features, targets.to(world.device))
            total += float(value) * tokens_in_window
            count += tokens_in_window
            after_window()
    finally:
        model.train(training)
    total, count = world.all_reduce([total, count])
    if not math.isfinite(total):
        raise NonFiniteError("the evaluation loss is not finite")
    return total / count


class Means:
    """Weighted means of named values."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0

    def add(self, values: Mapping[str, float], weight: float) -> None:
        """Add a value for each name, with a weight."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * value
        self._weight += weight

    def means(self, world: World) -> dict[str, float]:
        """Return the means over all processes."""
        if not self._weight:
            return {}
        sums = world.all_reduce([*self._sums.values(), self._weight])
        return {name: total / sums[-1] for name, total in zip(self._sums, sums, strict=False)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {"sums": dict(self._sums), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._sums, self._weight = dict(state["sums"]), state["weight"]


class Clock:
    """The seconds of work on a run, including those before it was resumed."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._start: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds until now."""
        since_start = 0.0 if self._start is None else time.perf_counter() - self._start
        return self._seconds + since_start

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time that the block takes."""
        self._start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds, self._start = self.seconds, None

    def start_from(self, seconds: float) -> None:
        """Continue from the seconds of a checkpoint."""
        self._seconds = seconds
