"""The progress of training and of campaigns: a bar on a terminal, lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from undrop.errors import UndropError
from undrop.lab.reproduce.campaign import Listener, Status
from undrop.lab.reproduce.records import Record
from undrop.lab.reproduce.worklist import PlannedRun
from undrop.lab.train.callbacks import Callback, RunInfo
from undrop.report import Bar, Progress, duration

_SMOOTH = 0.95  # smoothing factor of the objective's parts shown on the bar
_REFRESH = 0.1  # seconds


def progress_reporter() -> Callback:
    """Return a callback that shows the progress of a run on stderr."""
    return TrainingProgress(Progress())


class TrainingProgress(Callback):
    """A bar with the speed, the time left and the objective's parts; a line for every epoch.

    Without a terminal, a line for every record.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar: Bar | None = None
        self._epochs = 0
        self._parts: dict[str, float] = {}

    def begin(self, info: RunInfo) -> None:
        """Print the model, the text and the objective, and show the bar."""
        self._epochs = info.epochs
        self._began = self._shown = time.monotonic()
        self._done_before, self._tokens = info.done, 0
        resumed = f", resumed at {info.done:.0%}" if info.done else ""
        self._progress.print(
            f"{info.name}: {info.model} with {info.parameters:,} parameters on "
            f"{info.train_tokens:,} tokens of {info.corpus} ({info.vocabulary:,} words), "
            f"objective {info.objective}, on {info.device}{resumed}"
        )
        self._progress.__enter__()
        self._bar = self._progress.bar()

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Move the bar, at most ten times a second."""
        self._tokens += tokens
        for name, value in parts.items():
            self._parts[name] = _SMOOTH * self._parts.get(name, value) + (1 - _SMOOTH) * value
        now = time.monotonic()
        if self._bar is None or now - self._shown < _REFRESH:
            return
        advanced = done - self._done_before
        left = duration((now - self._began) / advanced * (1.0 - done)) if advanced > 0 else "?"
        speed = f"{self._tokens / max(now - self._shown, 1e-9):,.0f} tokens/s"
        epoch = f"epoch {int(done * self._epochs) + 1}/{self._epochs}"
        self._bar.show(done, f"{left} left", speed, *_parts(self._parts), title=epoch)
        self._shown, self._tokens = now, 0

    def record(self, record: Mapping[str, Any]) -> None:
        """Print a metrics record.

        While a bar is shown, print only epochs and a watcher's measurements.
        """
        head = f"epoch {record['epoch']}/{self._epochs}  step {record['step']}"
        if record["kind"] == "epoch":
            seconds = duration(record["time"]["seconds"])
            self._progress.print(f"{head}  {_perplexities(record)}  {seconds}")
        elif record["kind"] == "watch":
            self._progress.print(f"{head}  {_watched(record)}")
        elif record["kind"] == "step" and not self._progress.drawn:
            speed = f"{record['time']['tokens_per_second']:,.0f} tokens/s"
            self._progress.print("  ".join([head, *_parts(record), speed]))

    def say(self, text: str) -> None:
        """Print a message."""
        self._progress.print(text)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.close()


class DemoProgress(Callback):
    """The progress of one of several runs: a bar on a terminal, a line for every epoch elsewhere."""

    def __init__(self, progress: Progress, title: str, width: int) -> None:
        self._progress, self._title = progress, title
        self._bar = progress.bar(title.ljust(width))
        self._epochs = self._epoch = 0
        self._done, self._parts, self._valid = 0.0, [""], "…"

    def begin(self, info: RunInfo) -> None:
        """Remember the number of epochs."""
        self._epochs = info.epochs

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Move the bar."""
        self._done, self._parts = done, _parts(parts)
        self._show()

    def record(self, record: Mapping[str, Any]) -> None:
        """Show the end of an epoch."""
        if record["kind"] == "epoch":
            self._epoch, self._valid = record["epoch"], f"{record['valid_ppl']:.2f}"
            self._show()
            if not self._progress.drawn:
                epoch = f"{self._title}: epoch {self._epoch}/{self._epochs}"
                self._progress.print(f"{epoch}, validation perplexity {self._valid}")

    def end(self, summary: Mapping[str, Any]) -> None:
        """Fill the bar."""
        self._done = 1.0
        self._show()

    def _show(self) -> None:
        epoch = f"{self._epoch:>3}/{self._epochs}"
        self._bar.show(self._done, epoch, f"validation {self._valid}", *self._parts)


class CampaignProgress(Listener):
    """A bar over all runs, weighted by their time; a line for each run that ends.

    Args:
        progress: where to show it.
        jobs: the number of runs at a time.
    """

    def __init__(self, progress: Progress, jobs: int) -> None:
        self._progress, self._jobs = progress, jobs
        self._bar = progress.bar("runs")
        self._status: Status | None = None

    def status(self, status: Status) -> None:
        """Move the bar."""
        self._status = status
        whole = max(status.seconds_done + status.seconds_left, 1e-9)
        title = f"{status.done}/{status.total} runs"
        self._bar.show(status.seconds_done / whole, self._left(status), title=title)

    def ended(self, run: PlannedRun, record: Record) -> None:
        """Print the result of a run; without a bar, also the progress of the campaign."""
        line = (
            f"{run.title}: best validation {record.best_valid_ppl:.2f} (epoch {record.best_epoch}), "
            f"{duration(record.seconds)}"
        )
        if self._status is not None and not self._progress.drawn:
            done = f"{self._status.done + 1}/{self._status.total}"
            line += f"  [{done}, {self._left(self._status)}]"
        self._progress.print(line)

    def failed(self, run: PlannedRun, error: UndropError) -> None:
        """Print why a run failed."""
        self._progress.print(f"{run.title} failed: {error}")

    def _left(self, status: Status) -> str:
        return f"about {duration(status.seconds_left / self._jobs)} left"


def _parts(values: Mapping[str, Any]) -> list[str]:
    names = ("loss", "explicit", "implicit", "l2")
    return [f"{name} {values[name]:.3f}" for name in names if values.get(name) is not None]


def _watched(record: Mapping[str, Any]) -> str:
    shares = {name[6:]: value for name, value in record.items() if name.startswith("share/")}
    most = max(shares, key=lambda name: float(shares[name]), default=None)
    where = "" if most is None else f"  most of it at {most} ({shares[most]:.0%})"
    noise = f"  ‖ξ‖ {record['xi_norm']:.3g}" if "xi_norm" in record else ""
    return f"½uᵀHu {record['half_quadratic']:.4g}{noise}{where}"


def _perplexities(record: Mapping[str, Any]) -> str:
    splits = {"train_ppl": "training", "valid_ppl": "validation", "test_ppl": "test"}
    shown = [key for key in splits if record[key] is not None]
    return "  ".join(f"{splits[key]} {record[key]:.2f}" for key in shown)
