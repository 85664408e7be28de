"""A run's folder: what it holds, and the lock that one process at a time has on it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from undrop.errors import RunError
from undrop.files import TEMPORARY, naming_disk_errors, read_json, replacing, write_json
from undrop.lab.train.checkpoints import Checkpoints
from undrop.tensor_files import load_tensors, save_tensors

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
        """Whether a run was begun here; also one whose config.json was lost."""
        return self._config.exists() or self.checkpoints.folder.exists()

    def create(self) -> None:
        """Make the folder where it is missing."""
        with naming_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove what a killed process was writing; only who has the lock may."""
        for folder in (self.path, self.checkpoints.folder):
            # The second kind is safetensors' own.
            for path in [*folder.glob(f"*{TEMPORARY}"), *folder.glob(f"{TEMPORARY}*")]:
                path.unlink(missing_ok=True)

    @property
    def _config(self) -> Path:
        return self.path / "config.json"

    @property
    def _summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def _lock(self) -> Path:
        return self.path / "run.lock"

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
        if not self._config.exists():
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
        with naming_disk_errors(self._lock), self._lock.open("a+", encoding="utf-8") as file:
            if not _try_lock(file, fcntl.LOCK_EX, tries=5):
                raise self._in_use(_pid_in(file))
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def holder(self) -> str | None:
        """The process that has the lock; None if it is free."""
        if not self._lock.exists():
            return None
        with self._lock.open(encoding="utf-8") as file:
            return None if _try_lock(file, fcntl.LOCK_SH) else _pid_in(file)

    def refuse_if_taken(self) -> None:
        """See whether a new run can be begun here.

        Raises:
            RunError: naming the process that is training here, or else the run that is here.
        """
        if (holder := self.holder()) is not None:
            raise self._in_use(holder)
        self.refuse_if_begun()

    def refuse_if_begun(self) -> None:
        """See that there is no run here yet.

        Raises:
            RunError: if there is one.
        """
        if self.holds_run():
            raise RunError(
                f"{self.path} already holds a run: go on with it by --resume, or choose another "
                "--out."
            )

    def _in_use(self, pid: str) -> RunError:
        return RunError(
            f"{self.path} is in use by process {pid}: wait for it to end, or choose another --out."
        )


def _try_lock(file: IO[str], kind: int, tries: int = 1) -> bool:
    """Lock a file; more than one try outlasts those who only look who has it."""
    for left in reversed(range(tries)):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if left:
                time.sleep(0.02)
    return False


def _pid_in(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "(unknown)"


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
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
            records = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{self.path} is not a file of JSON lines: {error}.") from error
        if not all(isinstance(record, dict) for record in records):
            raise RunError(f"{self.path} was changed: not every line of it is a JSON object.")
        return records
