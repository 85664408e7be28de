"""The time that a measurement may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TypeVar

from undrop.errors import OptionError

Item = TypeVar("Item")

Show = Callable[[float, str], None]
"""Receives the part that is done, from 0 to 1, and what is being measured."""


class Budget:
    """A number of seconds to spend on measuring ``what``; ``show`` receives the part that is done.

    ``span`` is the part of the whole diagnosis that this budget covers, as (start, end).
    """

    def __init__(
        self,
        seconds: float,
        show: Show = lambda done, what: None,
        *,
        span: tuple[float, float] = (0.0, 1.0),
        what: str = "",
    ) -> None:
        self._seconds = seconds
        self._show, self._span, self._what = show, span, what
        self._began = time.monotonic()
        show(span[0], what)

    @property
    def elapsed(self) -> float:
        """The part of the time that has passed."""
        return (time.monotonic() - self._began) / self._seconds

    def spent(self, done: float = 0.0) -> bool:
        """Whether the time is up; ``done`` is the share of the work done, for the progress bar."""
        part = self.elapsed
        start, end = self._span
        self._show(start + (end - start) * min(max(part, done), 1.0), self._what)
        return part >= 1.0

    def visits(
        self, batches: Sequence[Item], rounds: int | None, *, least: int = 1
    ) -> Iterator[Item]:
        """Yield the batches in turn until the time is up or the rounds are done; None is no limit.

        The first ``least`` visits take place even if the time is up.
        """
        for turn in count() if rounds is None else range(rounds):
            for place, batch in enumerate(batches):
                taken = turn * len(batches) + place
                done = 0.0 if rounds is None else taken / (rounds * len(batches))
                if self.spent(done) and taken >= least:
                    return
                yield batch


def check_seconds(seconds: float) -> None:
    """Raise an ``OptionError`` if the seconds are not positive."""
    if not seconds > 0.0:
        raise OptionError(f"seconds must be more than 0, got {seconds}.")
