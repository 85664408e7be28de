"""Progress bars: one line per task on stderr, if stderr is a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_REFRESH_SECONDS = 0.1
_WIDE, _NARROW = 24, 8  # the length of a bar in columns


def duration(seconds: float) -> str:
    """Return a duration as text: 8 s, 2 min 05 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Bar:
    """One line: a title, a bar that fills up, and further fields.

    If the line does not fit the terminal, it omits the last fields; it never cuts a field.
    """

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._title = title
        self._done: float | None = None
        self._fields: tuple[str, ...] = ()

    def show(self, done: float | None, *fields: str, title: str | None = None) -> None:
        """Update the line.

        Args:
            done: the fraction of the task that is done, from 0 to 1; None shows no bar.
            fields: further texts, the most important first.
            title: a new title; None keeps the title.
        """
        self._done = None if done is None else min(max(done, 0.0), 1.0)
        self._fields = tuple(field for field in fields if field)
        self._title = self._title if title is None else title
        self._progress.refresh()

    def line(self, width: int, *, length: int = _WIDE, ascii_only: bool = False) -> str:
        """Return the line in at most ``width`` columns; ``length`` is that of the bar."""
        for count in range(len(self._fields), -1, -1):
            line = "  ".join([*self._title_and_bar(length, ascii_only), *self._fields[:count]])
            if len(line) <= width:
                return line
        return self._title[:width]

    def fits(self, width: int) -> bool:
        """Return whether a line with a wide bar and all fields fits."""
        return len("  ".join([*self._title_and_bar(_WIDE, True), *self._fields])) <= width

    def _title_and_bar(self, length: int, ascii_only: bool) -> list[str]:
        title = [self._title] if self._title else []
        if self._done is None:
            return title
        full, empty = ("#", "-") if ascii_only else ("━", "─")
        filled = int(length * self._done)
        return [*title, full * filled + empty * (length - filled), f"{self._done:4.0%}"]


class Progress:
    """Bars on stderr while a ``with`` block runs; they disappear when it ends.

    There are no bars if stderr is not a terminal, or if rich is not installed.

    >>> with Progress() as progress:
    ...     bar = progress.bar("reading")
    ...     bar.show(0.5, "1,200 tokens/s")

    Args:
        show: whether to draw bars.
        console: a rich console to draw on instead of stderr.
        keep: whether the bars stay on the screen when the block ends.
    """

    def __init__(
        self, show: bool = True, console: Console | None = None, *, keep: bool = False
    ) -> None:
        self._console = console if console is not None else _stderr() if show else None
        self.visible = show and self._console is not None and self._console.is_terminal
        """Whether bars are drawn."""
        self._keep = keep
        self._bars: list[Bar] = []
        self._live: Live | None = None
        self._last_refresh = 0.0

    def bar(self, title: str = "") -> Bar:
        """Add a bar with a title."""
        bar = Bar(self, title)
        self._bars.append(bar)
        self.refresh(now=True)
        return bar

    def print(self, text: str) -> None:
        """Print a line above the bars, or just on stderr if there are no bars."""
        if self._console is None:
            return
        # rich wraps lines at spaces for a terminal; a file has no width
        self._console.print(text, highlight=False, soft_wrap=not self.visible, markup=False)

    def refresh(self, *, now: bool = False) -> None:
        """Draw the bars, unless they were drawn less than 0.1 s ago."""
        if self._live is not None and (
            now or time.monotonic() - self._last_refresh >= _REFRESH_SECONDS
        ):
            self._last_refresh = time.monotonic()
            self._live.update(self._render(), refresh=True)

    def _render(self) -> Any:
        from rich.text import Text

        assert self._console is not None
        options = self._console.options
        width = options.max_width - 1
        length = _WIDE if all(bar.fits(width) for bar in self._bars) else _NARROW
        lines = [
            bar.line(width, length=length, ascii_only=options.ascii_only) for bar in self._bars
        ]
        return Text("\n".join(lines), no_wrap=True)

    def __enter__(self) -> Progress:
        if self.visible:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=not self._keep)
            self._live.start()
            self.refresh(now=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars; closing twice is fine."""
        if self._live is not None:
            self.refresh(now=True)
            self._live.stop()
            self._live = None


def _stderr() -> Console | None:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=True)
