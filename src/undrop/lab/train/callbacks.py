"""Callbacks follow a run while it trains: progress bars, loggers, and your own code.

::

    from undrop.lab.train import Callback, configure, run

    class PrintEpochs(Callback):
        def record(self, record):
            if record["kind"] == "epoch":
                print(record["epoch"], record["valid_ppl"])

    run(configure("demo"), out="runs/demo", callbacks=[PrintEpochs()])
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from undrop.errors import MissingExtraError
from undrop.files import naming_disk_errors, replacing
from undrop.registry import Registry

if TYPE_CHECKING:
    from undrop.diagnosis import Watcher
    from undrop.lab.train.config import Config
    from undrop.lab.train.folder import RunFolder
    from undrop.lab.train.trainer import Trainer


@dataclass(frozen=True)
class RunInfo:
    """The facts about a run that are known before its first step."""

    name: str
    model: str
    objective: str
    corpus: str
    parameters: int
    vocabulary: int
    train_tokens: int
    device: str
    epochs: int
    step: int  # the optimizer steps taken so far; 0 for a new run
    done: float  # the share of the run that is complete, from 0 to 1


class Callback:
    """Follows a run. Override the methods you need; by default they do nothing.

    With several processes, only the main one calls callbacks. A callback can draw random numbers in
    :meth:`observe` without changing the run.
    """

    kind = "callback"
    """The ``kind`` of the metrics records that :meth:`observe` adds."""

    def begin(self, info: RunInfo) -> None:
        """Called once, before the first step of a new or resumed run."""

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Called after each step.

        Args:
            done: the share of the run that is complete, from 0 to 1.
            tokens: the number of tokens of this step.
            parts: the values of the objective's parts.
        """

    def observe(self, trainer: Trainer, inputs: Any, targets: Any) -> Mapping[str, float] | None:
        """Called after each step with the model; the numbers that you return are added to the metrics.

        Args:
            trainer: gives access to ``model``, ``objective``, ``config``, ``step`` and ``epoch``.
            inputs: the model's inputs at this step.
            targets: the targets at this step.
        """
        return None

    def record(self, record: Mapping[str, Any]) -> None:
        """Called for each record that is added to the metrics."""

    def say(self, text: str) -> None:
        """Called with a message for the user."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """Called when the run is complete."""

    def close(self) -> None:
        """Called last, even if the run stops early or fails."""


class Watch(Callback):
    """Adds the numbers of an :class:`undrop.Watcher` to the metrics."""

    kind = "watch"

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def observe(self, trainer: Trainer, inputs: Any, targets: Any) -> Mapping[str, float] | None:
        """Let the watcher observe the model."""
        loss = trainer.objective.loss
        return self._watcher.observe(trainer.step, trainer.model, inputs, targets, loss=loss)


LOGGERS: Registry[str, type[Logger]] = Registry("logger")
"""The loggers that ``train.loggers`` can name."""


class Logger(Callback):
    """Sends the numbers of a run's metrics to another program. A subclass implements :meth:`log`.

    Args:
        folder: the run's folder.
        config: the run's settings.
    """

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self.folder, self.config = folder, config

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by names of the form ``kind/name``, such as ``epoch/valid_ppl``."""
        raise NotImplementedError

    def record(self, record: Mapping[str, Any]) -> None:
        """Log the floats of a record."""
        floats = {name: value for name, value in _fields(record) if isinstance(value, float)}
        kind, step = record["kind"], record["step"]
        self.log({f"{kind}/{name}": value for name, value in floats.items()}, step)


def _fields(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a record, without its kind and with those of ``time`` on the same level."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from value.items()
        elif name != "kind":
            yield name, value


@LOGGERS.register("csv")
class CSVLogger(Logger):
    """Writes ``csv/step.csv``, ``csv/epoch.csv`` and so on, one file for each kind of record.

    The files hold the same records as ``metrics.jsonl``, from which a resumed run rewrites them.
    """

    def __init__(self, folder: RunFolder, config: Config) -> None:
        super().__init__(folder, config)
        self._csv_folder = folder.path / "csv"
        self._columns: dict[str, list[str]] = {}

    def begin(self, info: RunInfo) -> None:
        """Write the records of a resumed run up to its checkpoint."""
        with naming_disk_errors(self._csv_folder):
            self._csv_folder.mkdir(exist_ok=True)
        for path in self._csv_folder.glob("*.csv"):
            path.unlink()
        for kind in {record["kind"] for record in self.folder.metrics.read()}:
            self._rewrite(kind)

    def record(self, record: Mapping[str, Any]) -> None:
        """Append a row."""
        kind, row = record["kind"], dict(_fields(record))
        if not row.keys() <= set(self._columns.get(kind, ())):
            self._rewrite(kind)  # with the new columns and this record, which is in metrics.jsonl
            return
        with naming_disk_errors(self._path(kind)), _open_csv(self._path(kind), "a") as file:
            csv.DictWriter(file, self._columns[kind]).writerow(row)

    def _rewrite(self, kind: str) -> None:
        """Write all records of a kind, with a column for every field that one of them has."""
        rows = [dict(_fields(r)) for r in self.folder.metrics.read() if r["kind"] == kind]
        self._columns[kind] = list(dict.fromkeys(name for row in rows for name in row))
        with replacing(self._path(kind)) as temporary, _open_csv(temporary, "w") as file:
            writer = csv.DictWriter(file, self._columns[kind])
            writer.writeheader()
            writer.writerows(rows)

    def _path(self, kind: str) -> Path:
        return self._csv_folder / f"{kind}.csv"


def _open_csv(path: Path, mode: str) -> IO[str]:
    return path.open(mode, newline="", encoding="utf-8")


def _import(module: str, extra: str) -> Any:
    """Import a module of the program that a logger needs; the error names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError("train.loggers", extra, extra) from error


@LOGGERS.register("tensorboard")
class TensorBoardLogger(Logger):
    """Writes scalars to the folder ``tensorboard`` in the run's folder."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        super().__init__(folder, config)
        self._new_writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = None

    def begin(self, info: RunInfo) -> None:
        """Open the writer, and delete records that are newer than the checkpoint of a resumed run."""
        path = str(self.folder.path / "tensorboard")
        self._writer = self._new_writer(path, purge_step=info.step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add one scalar for each number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()


@LOGGERS.register("wandb")
class WandbLogger(Logger):
    """Logs to Weights & Biases, in the project ``$WANDB_PROJECT`` or ``undrop``.

    A resumed run continues the same W&B run, which its folder's path identifies.
    """

    def __init__(self, folder: RunFolder, config: Config) -> None:
        super().__init__(folder, config)
        self._wandb = _import("wandb", "wandb")
        self._run: Any = None

    def begin(self, info: RunInfo) -> None:
        """Start or resume the W&B run."""
        path = self.folder.path.absolute()
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "undrop"),
            name=path.name,
            id=hashlib.sha256(str(path).encode()).hexdigest()[:16],
            dir=str(path),
            config=self.config.as_dict(),
            resume="allow",
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers at a step."""
        self._run.log(dict(values), step=step)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Copy the summary's numbers to the summary of the W&B run."""
        numbers = {key: value for key, value in summary.items() if isinstance(value, int | float)}
        self._run.summary.update(numbers)

    def close(self) -> None:
        """Finish the W&B run."""
        if self._run is not None:
            self._run.finish()
