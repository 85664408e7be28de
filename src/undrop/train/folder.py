"""A run's folder: what it holds, and the lock that one process at a time has on it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from undrop.errors import RunError
from undrop.train.checkpoints import Checkpoints, load_tensors, save_tensors
from undrop.train.files import naming_disk_errors, read_json, replacing, write_json

__all__ = ["Metrics", "RunFolder"]


class RunFolder:
    """The files of one run.

    - ``config.json``: every setting, as validated;
    - ``metrics.jsonl``: one JSON object per line, for every logged step and every epoch;
    - ``summary.json``: written when the run ends;
    - ``best.safetensors``: the weights of the best epoch by validation;
    - ``checkpoints/``: what ``--resume`` goes on from.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self.metrics = Metrics(self.path / "metrics.jsonl")

    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return self._config.exists()

    def create(self) -> None:
        """Make the folder where it is missing."""
        with naming_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    @property
    def _config(self) -> Path:
        return self.path / "config.json"

    @property
    def _summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def _best(self) -> Path:
        return self.path / "best.safetensors"

    def write_config(self, config: dict[str, Any]) -> None:
        """Save the run's settings."""
        write_json(self._config, config)

    def read_config(self) -> Any:
        """The run's settings as they were saved.

        Raises:
            RunError: if no run was begun here.
        """
        if not self.holds_run():
            raise RunError(f"{self.path} holds no run: it has no config.json.")
        return read_json(self._config)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Save how the run ended."""
        write_json(self._summary, summary)

    def read_summary(self) -> Any:
        """How the run ended; None if it has not."""
        return read_json(self._summary) if self._summary.exists() else None

    def write_best(self, tensors: dict[str, Tensor]) -> None:
        """Save the weights of the best epoch so far."""
        with replacing(self._best) as temporary:
            save_tensors(temporary, tensors)

    def read_best(self) -> dict[str, Tensor]:
        """The weights of the best epoch.

        Raises:
            RunError: if no epoch has ended yet.
        """
        if not self._best.exists():
            raise RunError(f"{self.path} has no trained weights yet: no epoch of it has ended.")
        return load_tensors(self._best)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other process from training in this folder.

        The lock is the system's (flock): it goes with the process, however that ends.

        Raises:
            RunError: naming the process that has it, if another one does.
        """
        path = self.path / "run.lock"
        with naming_disk_errors(path), path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise RunError(
                    f"{self.path} is in use by process {file.read().strip() or '(unknown)'}: "
                    "wait for it to end, or choose another --out."
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


class Metrics:
    """The run's measurements, one JSON object per line, appended as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add one line."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with naming_disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def sync(self) -> int:
        """Wait until all lines are on the disk; the file's length."""
        with naming_disk_errors(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def cut(self, length: int) -> None:
        """Forget all lines after the first ``length`` bytes.

        Raises:
            RunError: if there are not as many.
        """
        with naming_disk_errors(self.path), self.path.open("ab") as file:
            if file.tell() < length:
                raise RunError(f"{self.path} was cut short: {length} bytes were written to it.")
            file.truncate(length)

    def read(self) -> list[dict[str, Any]]:
        """All records; a last line that a kill cut short is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise RunError(f"{self.path} is not a file of JSON lines: {error}.") from error
