"""A run's folder: its files, its checkpoints, and a lock that one process can hold.

A checkpoint of step 1200 is two files. ``step-00001200.json`` names
``step-00001200.<token>.safetensors`` and its SHA-256. It is written last, under a temporary name, and
the checkpoint exists as soon as it is renamed. A kill before that leaves earlier checkpoints unchanged.
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
_REFUSED = ".refused"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run; the last ``keep`` are kept."""

    folder: Path
    keep: int = 2

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first."""
        found = (path.stem.removeprefix("step-") for path in self.folder.glob("step-*.json"))
        return sorted(int(step) for step in found if step.isdigit())

    def path(self, step: int) -> Path:
        """Return the path of the JSON file of a checkpoint."""
        return self.folder / f"step-{step:08d}.json"

    def save(self, step: int, state: Any) -> Path:
        """Write the checkpoint of ``step``, and then delete the oldest ones."""
        with naming_disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        packed, tensors = pack(state)
        # A new name each time: writing a step again never touches the file that an earlier checkpoint
        # of the same step needs.
        weights = self.folder / f"step-{step:08d}.{secrets.token_hex(4)}.safetensors"
        with replacing(weights) as temporary:
            save_tensors(temporary, tensors)
        body = {"format": _FORMAT, "step": step, "tensors": weights.name, "sha256": sha256(weights)}
        body["state"] = packed
        path = self.path(step)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({**body, "check": _check(body)}), encoding="utf-8")
        self._delete_old()
        return path

    def _delete_old(self) -> None:
        """Delete what the kept checkpoints do not need, including leftovers of a killed process."""
        kept = [self.path(step) for step in self.steps()[-self.keep :]]
        needed = {path.name for path in kept} | {read_json(path)["tensors"] for path in kept}
        # The JSON goes before the tensors that it names, so no checkpoint is ever incomplete.
        for path in sorted(self.folder.glob("step-*"), key=lambda p: (p.suffix != ".json", p.name)):
            if path.name not in needed and path.suffix != _REFUSED:
                path.unlink(missing_ok=True)

    def load(self, step: int) -> Any:
        """Load the state of ``step``.

        Raises:
            CheckpointError: if a byte of it or of its tensors has changed; the message names the file.
        """
        path = self.path(step)
        body = _read(path)
        tensors = self.folder / Path(body["tensors"]).name
        intact = False
        with contextlib.suppress(OSError, ValueError):  # no such file, or an impossible name
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
        """Load the newest intact checkpoint as (step, state); None if there is no checkpoint.

        A damaged checkpoint is reported through ``warn`` and renamed.

        Raises:
            CheckpointError: if there are checkpoints and all are damaged.
        """
        refused = ""
        for step in reversed(self.steps()):
            try:
                state = self.load(step)
            except CheckpointError as error:
                refused = str(error)
                warn(refused)
                path = self.path(step)
                os.replace(path, path.with_suffix(_REFUSED))
            else:
                return step, state
        if refused:
            raise CheckpointError(f"no intact checkpoint is left to resume from: {refused}")
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        body = read_json(path)
        check = body.pop("check")
        intact = check == _check(body) and body["format"] == _FORMAT and "state" in body
        intact = intact and all(isinstance(body[key], str) for key in ("tensors", "sha256"))
    except (CheckpointError, AttributeError, KeyError, TypeError):
        intact = False
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or unreadable: {error}") from error
    if not intact:
        raise CheckpointError(f"{path} is damaged: it was truncated or modified.")
    result: dict[str, Any] = body
    return result


def _check(body: dict[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's JSON, independent of its layout."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


_LOCK_WAIT = 0.1  # seconds; longer than a process needs to check who holds the lock


class RunFolder:
    """The files of one run.

    - ``config.json``: every setting, as validated;
    - ``metrics.jsonl``: one JSON object per line, for every logged step and every epoch;
    - ``summary.json``: the result, written when the run ends;
    - ``best.safetensors``: the weights of the best epoch by validation;
    - ``checkpoints/``: the states that ``--resume`` starts from.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self.metrics = MetricsFile(self.path / "metrics.jsonl")
        self._config = self.path / "config.json"
        self.summary = self.path / "summary.json"
        self._best = self.path / "best.safetensors"
        self._lock = self.path / "run.lock"
        self._pid = self.path / "run.pid"

    def holds_run(self) -> bool:
        """Return whether a run was started here, even if its config.json is lost."""
        return self._config.exists() or self.checkpoints.folder.exists()

    def remove_leftovers(self) -> None:
        """Remove the half-written files of a killed process; call it only while holding the lock."""
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
            RunError: if no run was started here.
        """
        if not self._config.exists():
            others = [config.parent.name for config in self.path.parent.glob("*/config.json")]
            near = get_close_matches(self.path.name, others, n=1)
            guess = f" Did you mean {self.path.parent / near[0]}?" if near else ""
            raise RunError(f"{self.path} holds no run: it has no config.json.{guess}")
        return read_json(self._config)

    def read_summary(self) -> Any:
        """Read the result of the run; None if it has not ended."""
        return read_json(self.summary) if self.summary.exists() else None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, after the metrics that belong to it are on the disk."""
        self.checkpoints.save(step, {**state, "metrics": self.metrics.sync()})

    def write_best(self, weights: Mapping[str, Tensor]) -> None:
        """Save the weights of the best epoch so far."""
        with replacing(self._best) as temporary:
            save_tensors(temporary, {name: with_own_storage(value) for name, value in weights.items()})

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
        """Make the folder, and keep every other process from training in it.

        The operating system releases the lock when the process ends, however it ends.

        Raises:
            RunError: naming the process that holds the lock, if another one does.
        """
        with naming_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with naming_disk_errors(self._lock):
                if not stack.enter_context(file_lock(self._lock, timeout=_LOCK_WAIT)):
                    raise self._in_use(self._holder_pid())
                self._pid.write_text(str(os.getpid()), encoding="utf-8")
            yield

    def holder(self) -> str | None:
        """Return the id of the process that holds the lock; None if the lock is free."""
        if not self._lock.exists():
            return None
        try:
            with file_lock(self._lock, timeout=_LOCK_WAIT) as free:
                return None if free else self._holder_pid()
        except OSError:  # no process can train on a disk that can't be written to
            return None

    def _holder_pid(self) -> str:
        try:
            return self._pid.read_text(encoding="utf-8").strip() or "(unknown)"
        except OSError:
            return "(unknown)"

    def refuse_if_in_use(self) -> None:
        """Check that a new run can start here.

        Raises:
            RunError: naming the process that trains here, or if a run was started here.
        """
        if (holder := self.holder()) is not None:
            raise self._in_use(holder)
        self.refuse_if_started()

    def refuse_if_started(self) -> None:
        """Check that no run was started here.

        Raises:
            RunError: if one was.
        """
        if self.holds_run():
            raise RunError(
                f"{self.path} already holds a run: resume it with --resume, or choose another --out."
            )

    def _in_use(self, pid: str) -> RunError:
        return RunError(
            f"{self.path} is in use by process {pid}: wait for it to end, or choose another --out."
        )


class MetricsFile:
    """The run's measurements, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add one line."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with naming_disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def sync(self) -> int:
        """Wait until all lines are on the disk, and return the file's length."""
        with naming_disk_errors(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def truncate(self, length: int) -> None:
        """Remove everything after the first ``length`` bytes.

        Raises:
            RunError: if the file is shorter.
        """
        with naming_disk_errors(self.path), self.path.open("ab") as file:
            if file.tell() < length:
                raise RunError(f"{self.path} was cut short: {length} bytes were written to it.")
            file.truncate(length)

    def read(self) -> list[dict[str, Any]]:
        """Read all records, except a last line that a kill cut short.

        Raises:
            RunError: if the file holds anything but JSON objects.
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
