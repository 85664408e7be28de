"""Measure what a step of each method costs, in steps of plain dropout."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from undrop.lab.reproduce import tables
from undrop.lab.reproduce.results import REFERENCE
from undrop.lab.train import Callback, Config, merge, train_interleaved

_STEPS = 25  # of an epoch, if the setting limits its text
_EPOCHS = 8
_WARMUP = 2  # epochs that are not counted: engines run their checks in the first steps


def measure_step_costs(
    setting: tables.Setting,
    methods: Sequence[tables.Method],
    *,
    data_dir: str | None = None,
    epochs: int = _EPOCHS,
) -> dict[str, float]:
    """Return each method's time for a step, divided by plain dropout's.

    All methods train in one process, one epoch of each in turn, so that other work on the machine slows
    all of them down alike. The result is the median over epochs of the ratio in the same turn.
    Evaluation is not counted.

    Args:
        setting: what to train.
        methods: the methods to time.
        data_dir: the folder to read the corpus from instead of downloading it.
        epochs: how many epochs to count, after two to warm up.
    """
    timed = {m.name: m for m in (tables.method(REFERENCE), *methods)}
    data = setting.settings["data"]
    text = _STEPS * data["batch_size"] * data["length"]
    share = min(1.0, text / data["limit_tokens"]) if "limit_tokens" in data else 1.0
    overlay = {
        "data": {"dir": data_dir, "eval_tokens": 1_000, "fraction": share},
        "train": {"epochs": epochs + _WARMUP, "test": "end", "train_perplexity": False},
    }
    configs = {
        name: Config.parse(merge(merge(setting.settings, m.variants()[0]), overlay))
        for name, m in timed.items()
    }
    watches = {name: _EpochTimes() for name in configs}
    with tempfile.TemporaryDirectory() as folder:
        train_interleaved(configs, out=folder, callbacks=watches)
    plain = watches[REFERENCE].seconds[_WARMUP:]
    return {
        name: statistics.median(
            own / other for own, other in zip(watch.seconds[_WARMUP:], plain, strict=True)
        )
        for name, watch in watches.items()
    }


class _EpochTimes(Callback):
    """The seconds from the first step of each epoch to its last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._first: float | None = None
        self._last = 0.0

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Note the time."""
        self._last = time.perf_counter()
        self._first = self._last if self._first is None else self._first

    def record(self, record: Mapping[str, Any]) -> None:
        """End an epoch."""
        if record["kind"] == "epoch":
            assert self._first is not None
            self.seconds.append(self._last - self._first)
            self._first = None
