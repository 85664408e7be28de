"""Checkpoints: tensors as safetensors, the rest as JSON with their checksum.

A checkpoint of step 1200 is two files. ``step-00001200.json`` names
``step-00001200.<token>.safetensors`` and its SHA-256; it is written last, and its rename is the
moment from which the checkpoint exists. A kill before that leaves the earlier checkpoints unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from undrop.errors import CheckpointError
from undrop.files import naming_disk_errors, read_json, replacing, sha256
from undrop.tensor_files import load_tensors, pack, save_tensors, unpack

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
        body = {"format": _FORMAT, "step": step, **self._save_tensors(step, tensors)}
        body["state"] = packed
        path = self.path(step)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({**body, "check": _check(body)}), encoding="utf-8")
        self._delete_old()
        return path

    def _save_tensors(self, step: int, tensors: dict[str, Tensor]) -> dict[str, str]:
        # A new name each time: writing a step again never touches the file that an earlier checkpoint
        # of the same step needs.
        path = self.folder / f"step-{step:08d}.{secrets.token_hex(4)}.safetensors"
        with replacing(path) as temporary:
            save_tensors(temporary, tensors)
        return {"tensors": path.name, "sha256": sha256(path)}

    def _delete_old(self) -> None:
        """Delete what the kept checkpoints do not need, leftovers of a kill included."""
        kept = [self.path(step) for step in self.steps()[-self.keep :]]
        needed = {path.name for path in kept} | {read_json(path)["tensors"] for path in kept}
        for path in sorted(self.folder.glob("step-*"), key=_json_first):
            if path.name not in needed and path.suffix != _REFUSED:
                path.unlink(missing_ok=True)

    def load(self, step: int) -> Any:
        """Load the state of ``step``.

        Raises:
            CheckpointError: naming the file, if a byte of it or of its tensors has changed.
        """
        path = self.path(step)
        body = _read(path)
        tensors_path = self.folder / Path(body["tensors"]).name
        if _sha256_or_none(tensors_path) != body["sha256"]:
            raise CheckpointError(
                f"{path} is refused: its tensors in {tensors_path.name} were cut short or changed."
            )
        try:
            return unpack(body["state"], load_tensors(tensors_path))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is refused: its state was changed.") from error

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
        raise CheckpointError(f"{path} is refused: {error}") from error
    if not intact:
        raise CheckpointError(f"{path} is refused: it was cut short or changed.")
    result: dict[str, Any] = body
    return result


def _sha256_or_none(path: Path) -> str | None:
    """Return the checksum of a file; None if there is no such file, or the name is impossible."""
    try:
        return sha256(path)
    except (OSError, ValueError):
        return None


def _check(body: dict[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's JSON, independent of its layout."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _json_first(path: Path) -> tuple[bool, str]:
    """Sort key that makes a checkpoint lose its JSON before its tensors."""
    return path.suffix != ".json", path.name
