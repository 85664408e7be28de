"""Time budgets of measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import TypeVar

from undrop.errors import OptionError

Item = TypeVar("Item")


class Budget:
    """The seconds that one measurement may take.

    Args:
        seconds: the seconds, counted from now.
        show: receives the completed part of the diagnosis, from 0 to 1.
        span: the part of the diagnosis that this measurement makes up, as (start, end).
    """

    def __init__(
        self,
        seconds: float,
        show: Callable[[float], None] = lambda done: None,
        span: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self._seconds, self._show, self._span = seconds, show, span
        self._began = time.monotonic()
        show(span[0])

    @property
    def elapsed(self) -> float:
        """The part of the time that has passed."""
        return (time.monotonic() - self._began) / self._seconds

    def is_over(self, done: float = 0.0) -> bool:
        """Show the progress, and return whether the time is up.

        ``done`` is the completed share of the work. If it is larger than the elapsed share of the time,
        the progress bar shows it instead.
        """
        elapsed = self.elapsed
        start, end = self._span
        self._show(start + (end - start) * min(max(elapsed, done), 1.0))
        return elapsed >= 1.0

    def visits(
        self, batches: Sequence[Item], rounds: int | None, *, minimum: int = 1
    ) -> Iterator[Item]:
        """Yield the batches in turn, ``rounds`` times (None: without limit), until the time is up.

        The first ``minimum`` batches are yielded even if the time is up.
        """
        total = None if rounds is None else rounds * len(batches)
        for visit, batch in enumerate(islice(cycle(batches), total)):
            done = 0.0 if total is None else visit / total
            if self.is_over(done) and visit >= minimum:
                return
            yield batch


def check_seconds(seconds: float) -> None:
    """Raise an ``OptionError`` if the seconds are not positive."""
    if not seconds > 0.0:
        raise OptionError(f"seconds must be more than 0, got {seconds}.")
