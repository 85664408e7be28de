"""Show the progress of training and of campaigns: a bar on a terminal, lines anywhere else."""

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

_SMOOTHING = 0.95  # of the objective's parts on the bar
_REFRESH_SECONDS = 0.1


class TrainingProgress(Callback):
    """A bar with the time left, the speed and the objective's parts, and a line for every epoch.

    Without a terminal, there is a line for every logged step instead of the bar.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress or Progress()
        self._bar: Bar | None = None
        self._epochs = 0
        self._parts: dict[str, float] = {}

    def begin(self, info: RunInfo) -> None:
        """Print the model, the text and the objective, and show the bar."""
        self._epochs = info.epochs
        self._start = self._last_update = time.monotonic()
        self._done_at_start, self._tokens_since_update = info.done, 0
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
        self._tokens_since_update += tokens
        for name, value in parts.items():
            average = self._parts.get(name, value)
            self._parts[name] = _SMOOTHING * average + (1 - _SMOOTHING) * value
        now = time.monotonic()
        elapsed = now - self._last_update
        if self._bar is None or elapsed < _REFRESH_SECONDS:
            return
        advance = done - self._done_at_start
        left = duration((now - self._start) / advance * (1.0 - done)) if advance > 0 else "?"
        speed = f"{self._tokens_since_update / max(elapsed, 1e-9):,.0f} tokens/s"
        epoch = f"epoch {int(done * self._epochs) + 1}/{self._epochs}"
        self._bar.show(done, f"{left} left", speed, *_format_parts(self._parts), title=epoch)
        self._last_update, self._tokens_since_update = now, 0

    def record(self, record: Mapping[str, Any]) -> None:
        """Print a line about an epoch or a measurement, and without a bar about a logged step."""
        head = f"epoch {record['epoch']}/{self._epochs}  step {record['step']}"
        if record["kind"] == "epoch":
            seconds = duration(record["time"]["seconds"])
            self._progress.print(f"{head}  {_format_perplexities(record)}  {seconds}")
        elif record["kind"] == "watch":
            self._progress.print(f"{head}  {_format_watch(record)}")
        elif record["kind"] == "step" and not self._progress.visible:
            speed = f"{record['time']['tokens_per_second']:,.0f} tokens/s"
            self._progress.print("  ".join([head, *_format_parts(record), speed]))

    def say(self, text: str) -> None:
        """Print a message."""
        self._progress.print(text)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.close()


class DemoProgress(Callback):
    """The progress of one of the demo's runs: a bar on a terminal, else a line for every epoch."""

    def __init__(self, progress: Progress, title: str, width: int) -> None:
        self._progress, self._title = progress, title
        self._bar = progress.bar(title.ljust(width))
        self._epochs = self._epoch = 0
        self._done, self._parts, self._perplexity = 0.0, [""], "…"

    def begin(self, info: RunInfo) -> None:
        """Remember the number of epochs."""
        self._epochs = info.epochs

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Move the bar."""
        self._done, self._parts = done, _format_parts(parts)
        self._update_bar()

    def record(self, record: Mapping[str, Any]) -> None:
        """Show an epoch's validation perplexity."""
        if record["kind"] == "epoch":
            self._epoch, self._perplexity = record["epoch"], f"{record['valid_ppl']:.2f}"
            self._update_bar()
            if not self._progress.visible:
                epoch = f"{self._title}: epoch {self._epoch}/{self._epochs}"
                self._progress.print(f"{epoch}, validation perplexity {self._perplexity}")

    def end(self, summary: Mapping[str, Any]) -> None:
        """Fill the bar."""
        self._done = 1.0
        self._update_bar()

    def _update_bar(self) -> None:
        epoch = f"{self._epoch:>3}/{self._epochs}"
        self._bar.show(self._done, epoch, f"validation {self._perplexity}", *self._parts)


class CampaignProgress(Listener):
    """A bar with the share of the estimated time that has passed, and a line for each run that ends.

    Args:
        progress: where to show the bar and the lines.
        jobs: the number of runs in parallel.
    """

    def __init__(self, progress: Progress, jobs: int) -> None:
        self._progress, self._jobs = progress, jobs
        self._bar = progress.bar("runs")
        self._status: Status | None = None

    def status(self, status: Status) -> None:
        """Move the bar."""
        self._status = status
        total = max(status.seconds_done + status.seconds_left, 1e-9)
        title = f"{status.done}/{status.total} runs"
        self._bar.show(status.seconds_done / total, self._time_left(status), title=title)

    def ended(self, run: PlannedRun, record: Record) -> None:
        """Print the result of a run; without a bar, also the progress of the campaign."""
        line = (
            f"{run.title}: best validation {record.best_valid_ppl:.2f} (epoch {record.best_epoch}), "
            f"{duration(record.seconds)}"
        )
        if self._status is not None and not self._progress.visible:
            done = f"{self._status.done + 1}/{self._status.total}"
            line += f"  [{done}, {self._time_left(self._status)}]"
        self._progress.print(line)

    def failed(self, run: PlannedRun, error: UndropError) -> None:
        """Print why a run failed."""
        self._progress.print(f"{run.title} failed: {error}")

    def _time_left(self, status: Status) -> str:
        return f"about {duration(status.seconds_left / self._jobs)} left"


def _format_parts(values: Mapping[str, Any]) -> list[str]:
    names = ("loss", "explicit", "implicit", "l2")
    return [f"{name} {values[name]:.3f}" for name in names if values.get(name) is not None]


def _format_watch(record: Mapping[str, Any]) -> str:
    text = f"½uᵀHu {record['half_quadratic']:.4g}"
    shares = {key: value for key, value in record.items() if key.startswith("share/")}
    if shares:
        largest = max(shares, key=shares.__getitem__)
        text += f", {shares[largest]:.0%} of it at {largest.removeprefix('share/')}"
    return text + (f"  ‖ξ‖ {record['xi_norm']:.3g}" if "xi_norm" in record else "")


def _format_perplexities(record: Mapping[str, Any]) -> str:
    splits = {"train_ppl": "training", "valid_ppl": "validation", "test_ppl": "test"}
    shown = [key for key in splits if record[key] is not None]
    return "  ".join(f"{splits[key]} {record[key]:.2f}" for key in shown)
