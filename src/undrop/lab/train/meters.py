"""Means over steps, and clocks, that survive a restart."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from undrop.lab.train.world import World

__all__ = ["Clock", "Means", "Speed", "perplexity"]

_LARGEST = 700.0  # exp of more is no float, and no JSON


def perplexity(loss: float) -> float:
    """exp(ℓ), kept finite."""
    return math.exp(min(loss, _LARGEST))


class Means:
    """Weighted means of named values."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weight = 0.0

    def add(self, values: Mapping[str, float], weight: float) -> None:
        """Take one more set of values in."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + weight * value
        self._weight += weight

    def means(self, world: World) -> dict[str, float]:
        """The means, over all processes."""
        if not self._weight:
            return {}
        sums = world.sums([*self._sums.values(), self._weight])
        return {name: total / sums[-1] for name, total in zip(self._sums, sums, strict=False)}

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on."""
        return {"sums": dict(self._sums), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._sums, self._weight = dict(state["sums"]), state["weight"]


class Clock:
    """Seconds of work, over all processes that a run was worked on in."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds until now."""
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return self._seconds + running

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time in here."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._seconds, self._since = self.seconds, None

    def start_from(self, seconds: float) -> None:
        """Take over the seconds of an earlier process."""
        self._seconds = seconds


class Speed:
    """Tokens per second, here and now: the one thing that a restart may change."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._since, self._tokens = time.perf_counter(), 0

    def add(self, tokens: int) -> None:
        """Count tokens."""
        self._tokens += tokens

    def take(self) -> float:
        """The tokens per second since the last time."""
        value = self._tokens / max(time.perf_counter() - self._since, 1e-9)
        self.restart()
        return value
