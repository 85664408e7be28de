"""The folder of a run: its files, its checkpoints, and a lock that one process at a time can hold.

A checkpoint consists of two files. For step 1200, ``step-00001200.<token>.safetensors`` holds the
tensors. ``step-00001200.json`` holds everything else, and the name and SHA-256 of the tensor file. The
tensors are written first. The JSON is written under a temporary name, and the checkpoint exists from the
moment when it is renamed. If the process is killed before, the earlier checkpoints are unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor

from undrop.errors import CheckpointError, RunError
from undrop.files import (
    TEMPORARY,
    file_lock,
    naming_disk_errors,
    read_json,
    replacing,
    sha256,
    write_json,
)
from undrop.tensor_files import load_tensors, pack, save_tensors, unpack, with_own_storage

_FORMAT = 1
_MAX_CHECKPOINTS = 2
_DAMAGED_SUFFIX = ".refused"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run. Saving one deletes all but the last two."""

    folder: Path

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in increasing order."""
        numbers = (path.stem.removeprefix("step-") for path in self.folder.glob("step-*.json"))
        return sorted(int(number) for number in numbers if number.isdigit())

    def path(self, step: int) -> Path:
        """Return the path of the JSON file of a checkpoint."""
        return self.folder / f"step-{step:08d}.json"

    def save(self, step: int, state: Any) -> Path:
        """Write the checkpoint of ``step``, delete old ones, and return the path of its JSON file."""
        with naming_disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        packed, tensors = pack(state)
        # A random name: if this step already has a checkpoint, the new tensors must not overwrite the
        # old ones before the new JSON exists.
        tensor_file = self.folder / f"step-{step:08d}.{secrets.token_hex(4)}.safetensors"
        with replacing(tensor_file) as temporary:
            save_tensors(temporary, tensors)
        body = {
            "format": _FORMAT,
            "step": step,
            "tensors": tensor_file.name,
            "sha256": sha256(tensor_file),
            "state": packed,
        }
        path = self.path(step)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({**body, "check": _checksum(body)}), encoding="utf-8")
        self._delete_old()
        return path

    def _delete_old(self) -> None:
        """Delete the files that the last checkpoints do not need, and leftovers of a killed process."""
        needed = set()
        for step in self.steps()[-_MAX_CHECKPOINTS:]:
            needed.add(self.path(step).name)
            with contextlib.suppress(CheckpointError):  # damaged JSON does not name its tensors
                needed.add(_read_body(self.path(step))["tensors"])
        # JSON files first: after a kill in between, no JSON may name tensors that are already deleted.
        for path in sorted(self.folder.glob("step-*"), key=lambda p: (p.suffix != ".json", p.name)):
            if path.name not in needed and path.suffix != _DAMAGED_SUFFIX:
                path.unlink(missing_ok=True)

    def load(self, step: int) -> Any:
        """Load the state of ``step``.

        Raises:
            CheckpointError: if a byte of one of its two files has changed; the message names the file.
        """
        path = self.path(step)
        body = _read_body(path)
        tensors = self.folder / Path(body["tensors"]).name
        intact = False
        with contextlib.suppress(OSError, ValueError):  # no such file, or not a valid file name
            intact = sha256(tensors) == body["sha256"]
        if not intact:
            raise CheckpointError(
                f"{path} is damaged: its tensors in {tensors.name} were truncated or modified."
            )
        try:
            return unpack(body["state"], load_tensors(tensors))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: its state was modified.") from error

    def newest(self, warn: Callable[[str], None]) -> tuple[int, Any] | None:
        """Return the step and the state of the newest intact checkpoint; None if there is no checkpoint.

        Damaged checkpoints are reported through ``warn`` and renamed.

        Raises:
            CheckpointError: if there are checkpoints but all are damaged.
        """
        damage = ""
        for step in reversed(self.steps()):
            try:
                return step, self.load(step)
            except CheckpointError as error:
                damage = str(error)
                warn(damage)
                path = self.path(step)
                os.replace(path, path.with_suffix(_DAMAGED_SUFFIX))
        if damage:
            raise CheckpointError(f"no intact checkpoint is left to resume from: {damage}")
        return None


def _read_body(path: Path) -> dict[str, Any]:
    """Read the JSON of a checkpoint, and verify its checksum."""
    try:
        body: dict[str, Any] = read_json(path)
        checksum = body.pop("check")
        intact = checksum == _checksum(body) and body["format"] == _FORMAT and "state" in body
        intact = intact and all(isinstance(body[key], str) for key in ("tensors", "sha256"))
    except (AttributeError, KeyError, TypeError):  # JSON, but not of a checkpoint
        intact = False
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or unreadable: {error}") from error
    if not intact:
        raise CheckpointError(f"{path} is damaged: it was truncated or modified.")
    return body


def _checksum(body: dict[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's JSON, which does not depend on its whitespace."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


_LOCK_TIMEOUT = 0.1  # seconds; longer than ``holder`` in another process holds the lock


class RunFolder:
    """The files of one run.

    - ``config.json``: all settings, including the defaults;
    - ``metrics.jsonl``: one JSON object per line, for every logged step and every epoch;
    - ``summary.json``: the result, written when the run ends;
    - ``best.safetensors``: the weights of the best epoch by validation;
    - ``checkpoints/``: the states from which ``--resume`` continues.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self.metrics = MetricsFile(self.path / "metrics.jsonl")
        self._config = self.path / "config.json"
        self._summary = self.path / "summary.json"
        self._best = self.path / "best.safetensors"
        self._lock = self.path / "run.lock"
        self._pid = self.path / "run.pid"

    def holds_run(self) -> bool:
        """Return whether a run was started in this folder, even if its config.json is lost."""
        return self._config.exists() or self.checkpoints.folder.exists()

    def remove_leftovers(self) -> None:
        """Delete the half-written files of a killed process; the caller must hold the lock."""
        for folder in (self.path, self.checkpoints.folder):
            # The second pattern matches the temporary files of safetensors.
            for path in [*folder.glob(f"*{TEMPORARY}"), *folder.glob(f"{TEMPORARY}*")]:
                path.unlink(missing_ok=True)

    def write_config(self, config: dict[str, Any]) -> None:
        """Save the run's settings."""
        write_json(self._config, config)

    def read_config(self) -> Any:
        """Read the run's settings.

        Raises:
            RunError: if there is no config.json.
        """
        if not self._config.exists():
            others = [config.parent.name for config in self.path.parent.glob("*/config.json")]
            near = get_close_matches(self.path.name, others, n=1)
            guess = f" Did you mean {self.path.parent / near[0]}?" if near else ""
            raise RunError(f"{self.path} holds no run: it has no config.json.{guess}")
        return read_json(self._config)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Save the result of the run."""
        write_json(self._summary, summary)

    def read_summary(self) -> Any:
        """Read the result of the run, or return None if the run has not ended."""
        return read_json(self._summary) if self._summary.exists() else None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint with the length of the metrics, once these are on the disk."""
        self.checkpoints.save(step, {**state, "metrics": self.metrics.sync()})

    def write_best(self, weights: Mapping[str, Tensor]) -> None:
        """Save the weights of the best epoch so far."""
        with replacing(self._best) as path:
            save_tensors(path, {name: with_own_storage(value) for name, value in weights.items()})

    def read_best(self) -> dict[str, Tensor]:
        """Read the weights of the best epoch.

        Raises:
            RunError: if no epoch has ended yet.
        """
        if not self._best.exists():
            raise RunError(f"{self.path} has no trained weights yet: no epoch of it has ended.")
        return load_tensors(self._best)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and hold its lock within the block, so that no other process trains in it.

        The operating system releases the lock when the process ends, even if it is killed.

        Raises:
            RunError: if another process holds the lock; the message names it.
        """
        with naming_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with naming_disk_errors(self._lock):
                if not stack.enter_context(file_lock(self._lock, timeout=_LOCK_TIMEOUT)):
                    raise self._in_use()
                self._pid.write_text(str(os.getpid()), encoding="utf-8")
            yield

    def holder(self) -> str | None:
        """Return the id of the process that holds the lock; None if the lock is free."""
        if not self._lock.exists():
            return None
        try:
            with file_lock(self._lock, timeout=_LOCK_TIMEOUT) as acquired:
                return None if acquired else self._holder_pid()
        except OSError:  # no process can train on a read-only disk
            return None

    def _holder_pid(self) -> str:
        try:
            return self._pid.read_text(encoding="utf-8").strip() or "(unknown)"
        except OSError:
            return "(unknown)"

    def refuse_if_used(self) -> None:
        """Check that a new run can start in this folder.

        Raises:
            RunError: if another process trains in this folder, or the folder holds a run.
        """
        if self.holder() is not None:
            raise self._in_use()
        self.refuse_if_started()

    def refuse_if_started(self) -> None:
        """Check that no run was started in this folder.

        Raises:
            RunError: if the folder holds a run.
        """
        if self.holds_run():
            raise RunError(
                f"{self.path} already holds a run: resume it with --resume, or choose another --out."
            )

    def _in_use(self) -> RunError:
        return RunError(
            f"{self.path} is in use by process {self._holder_pid()}: wait for it to end, or choose "
            "another --out."
        )


class MetricsFile:
    """``metrics.jsonl``: the records of a run, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Append a record as one line."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with naming_disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def sync(self) -> int:
        """Wait until all lines are on the disk, and return the length of the file in bytes."""
        with naming_disk_errors(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def truncate(self, length: int) -> None:
        """Delete everything after the first ``length`` bytes.

        Raises:
            RunError: if the file is shorter.
        """
        with naming_disk_errors(self.path), self.path.open("ab") as file:
            if file.tell() < length:
                raise RunError(f"{self.path} was cut short: {length} bytes were written to it.")
            file.truncate(length)

    def read(self) -> list[dict[str, Any]]:
        """Read all records, except a last line that a killed process left incomplete.

        Raises:
            RunError: if a line is not a JSON object.
        """
        if not self.path.exists():
            return []
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")[:-1]
            records = [json.loads(line) for line in lines]
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{self.path} is not a file of JSON lines: {error}.") from error
        if not all(isinstance(record, dict) for record in records):
            raise RunError(f"{self.path} was changed: not every line is a JSON object.")
        return records

    def epochs(self) -> list[dict[str, Any]]:
        """Read the records of the epochs."""
        return [record for record in self.read() if record["kind"] == "epoch"]
