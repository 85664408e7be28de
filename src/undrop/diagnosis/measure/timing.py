"""How long a study may take, and the bar that shows how far it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from undrop.errors import OptionError

__all__ = ["Budget", "progress_bar"]

Show = Callable[[float, str], None]
"""Told the part that is done and what is going on."""


class Budget:
    """Seconds that are running out.

    Args:
        seconds: how many.
        show: hears of the part that is done.
        of: the part of the whole study that this is, as (start, end).
        what: what is going on.
    """

    def __init__(
        self, seconds: float, show: Show, *, of: tuple[float, float] = (0.0, 1.0), what: str = ""
    ) -> None:
        self._seconds = seconds
        self._show, self._of, self._what = show, of, what
        self._began = time.monotonic()
        show(of[0], what)

    @property
    def elapsed(self) -> float:
        """The part of the time that is over."""
        return (time.monotonic() - self._began) / self._seconds

    def spent(self, done: float = 0.0) -> bool:
        """Whether the time is over; ``done`` is the part of the work, if more than that of the time."""
        part = self.elapsed
        start, end = self._of
        self._show(start + (end - start) * min(max(part, done), 1.0), self._what)
        return part >= 1.0


def checked_seconds(seconds: float) -> float:
    """The seconds, if they are more than none.

    Raises:
        OptionError: if they are not.
    """
    if not seconds > 0.0:
        raise OptionError(f"seconds must be more than 0, got {seconds}.")
    return seconds


@contextlib.contextmanager
def progress_bar(wanted: bool) -> Iterator[Show]:
    """A bar on stderr, if it is wanted and stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    disabled = not (wanted and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=disabled) as progress:
        task = progress.add_task("", total=1.0)

        def show(done: float, what: str) -> None:
            progress.update(task, completed=done, description=what)

        yield show
