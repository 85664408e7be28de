"""How a training looks while it runs: a bar on a terminal, lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from undrop.lab.train.callbacks import Callback, RunInfo

__all__ = ["Bar", "Lines", "duration", "progress_reporter"]

_SMOOTH = 0.95  # of the parts that are shown
_REFRESH = 0.1  # seconds


def progress_reporter() -> Callback:
    """A reporter to stderr that fits what stderr is."""
    console = Console(stderr=True)
    return Bar(console) if console.is_terminal else Lines(console)


def duration(seconds: float) -> str:
    """Seconds as a person says them: 8 s, 2 min 05 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Lines(Callback):
    """One line for each record: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._print = lambda text: console.print(text, highlight=False, soft_wrap=True)
        self._epochs = 0

    def begin(self, info: RunInfo) -> None:
        """Say what is trained on what."""
        self._epochs = info.epochs
        self._print(
            f"{info.name}: {info.model} of {info.parameters:,} parameters on "
            f"{info.train_tokens:,} tokens of {info.corpus} ({info.vocabulary:,} words), "
            f"objective {info.objective}, on {info.device}"
            + (f", from {info.done:.0%} on" if info.done else "")
        )

    def record(self, record: Mapping[str, Any]) -> None:
        """Say how it goes."""
        head = f"epoch {record['epoch']}/{self._epochs}  step {record['step']}"
        if record["kind"] == "epoch":
            self._print(f"{head}  {_judged(record)}  {duration(record['time']['seconds'])}")
        elif record["kind"] == "watch":
            self._print(f"{head}  {_watched(record)}")
        elif record["kind"] == "step":
            speed = record["time"]["tokens_per_second"]
            self._print(f"{head}  {_parts(record)}  {speed:,.0f} tokens/s")

    def say(self, text: str) -> None:
        """Pass it on."""
        self._print(text)


class Bar(Lines):
    """A bar with the epoch, tokens/s, the objective's parts and the time left; epochs as lines."""

    def __init__(self, console: Console) -> None:
        columns = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TextColumn("{task.fields[parts]}"),
            TextColumn("{task.fields[left]} left"),
        ]
        self._progress = Progress(*columns, console=console, transient=True)
        super().__init__(self._progress.console)
        self._parts: dict[str, float] = {}

    def begin(self, info: RunInfo) -> None:
        """Show the bar."""
        super().begin(info)
        self._began, self._done_before = time.monotonic(), info.done
        self._shown, self._tokens = self._began, 0
        self._task = self._progress.add_task("", total=1.0, speed=0.0, parts="", left="?")
        self._progress.update(self._task, completed=info.done)
        self._progress.start()

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Move the bar, now and then."""
        self._tokens += tokens
        for name, value in parts.items():
            self._parts[name] = _SMOOTH * self._parts.get(name, value) + (1 - _SMOOTH) * value
        now = time.monotonic()
        if now - self._shown < _REFRESH:
            return
        elapsed, advanced = now - self._began, done - self._done_before
        self._progress.update(
            self._task,
            completed=done,
            description=f"epoch {int(done * self._epochs) + 1}/{self._epochs}",
            speed=self._tokens / (now - self._shown),
            parts=_parts(self._parts),
            left=duration(elapsed / advanced * (1.0 - done)) if advanced > 0 else "?",
        )
        self._shown, self._tokens = now, 0

    def record(self, record: Mapping[str, Any]) -> None:
        """Say how an epoch ended; the bar shows the rest."""
        if record["kind"] in ("epoch", "watch"):
            super().record(record)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()


def _parts(values: Mapping[str, Any]) -> str:
    names = ("loss", "explicit", "implicit", "l2")
    shown = [name for name in names if values.get(name) is not None]
    return "  ".join(f"{name} {values[name]:.3f}" for name in shown)


def _watched(record: Mapping[str, Any]) -> str:
    shares = {name[6:]: value for name, value in record.items() if name.startswith("share/")}
    most = max(shares, key=lambda name: float(shares[name]), default=None)
    where = "" if most is None else f"  most of it at {most} ({shares[most]:.0%})"
    noise = f"  ‖ξ‖ {record['xi_norm']:.3g}" if "xi_norm" in record else ""
    return f"½uᵀHu {record['half_quadratic']:.4g}{noise}{where}"


def _judged(record: Mapping[str, Any]) -> str:
    splits = {"train_ppl": "training", "valid_ppl": "validation", "test_ppl": "test"}
    shown = [key for key in splits if record[key] is not None]
    return "  ".join(f"{splits[key]} {record[key]:.2f}" for key in shown)
