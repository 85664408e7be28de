"""How a campaign of experiments looks while it runs: a bar on a terminal, lines everywhere else."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from undrop.errors import UndropError
from undrop.lab.cli._progress import duration
from undrop.lab.reproduce import Listener, Status
from undrop.lab.reproduce.plan import Run
from undrop.lab.reproduce.records import Record

__all__ = ["CampaignBar", "CampaignLines", "campaign_listener"]


class CampaignLines(Listener):
    """One line for each run that ends, with how far the whole is."""

    def __init__(self, console: Console, jobs: int) -> None:
        self._print = lambda text: console.print(
            text, highlight=False, soft_wrap=True, markup=False
        )
        self._jobs = jobs
        self._status: Status | None = None

    def status(self, status: Status) -> None:
        """Keep it for the next line."""
        self._status = status

    def ended(self, run: Run, record: Record) -> None:
        """Say what came of it."""
        self._print(
            f"{run.title}: best validation {record.best_valid_ppl:.2f} (epoch {record.best_epoch}), "
            f"{duration(record.seconds)}{self._whole()}"
        )

    def failed(self, run: Run, error: UndropError) -> None:
        """Say why."""
        self._print(f"{run.title} failed: {error}")

    def _whole(self) -> str:
        if self._status is None:
            return ""
        left = duration(self._status.seconds_left / self._jobs)
        return f"  [{self._status.done + 1}/{self._status.total}, about {left} left]"

    def close(self) -> None:
        """Nothing is open."""


class CampaignBar(CampaignLines):
    """A bar over all runs, weighted by their time; ended runs as lines above it."""

    def __init__(self, console: Console, jobs: int) -> None:
        self._progress = Progress(
            TextColumn("{task.fields[runs]} runs"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("about {task.fields[left]} left"),
            console=console,
            transient=True,
        )
        super().__init__(self._progress.console, jobs)
        self._task = self._progress.add_task("", total=1.0, runs="", left="?")
        self._progress.start()

    def status(self, status: Status) -> None:
        """Move the bar."""
        super().status(status)
        self._progress.update(
            self._task,
            total=max(status.seconds_done + status.seconds_left, 1e-9),
            completed=status.seconds_done,
            runs=f"{status.done}/{status.total}",
            left=duration(status.seconds_left / self._jobs),
        )

    def _whole(self) -> str:
        return ""

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


def campaign_listener(jobs: int) -> CampaignLines:
    """A listener that fits what stderr is."""
    console = Console(stderr=True)
    return (CampaignBar if console.is_terminal else CampaignLines)(console, jobs)
