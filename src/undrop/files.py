"""Files that are there whole or not at all, whatever the moment of a crash."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from undrop.errors import RunError

__all__ = [
    "TEMPORARY",
    "check_writable",
    "naming_disk_errors",
    "read_json",
    "replacing",
    "sha256",
    "write_json",
]

TEMPORARY = ".tmp"
"""The suffix of a file that is being written; one that is left over means nothing."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def naming_disk_errors(path: Path) -> Iterator[None]:
    """Turn what the system says of ``path`` into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise RunError(
                f"the disk is full: {path} could not be written; nothing written earlier is lost, "
                "make room and go on with --resume."
            ) from error
        reason = (error.strerror or str(error)).lower()
        raise RunError(f"{path} can't be written: {reason}.") from error


def check_writable(path: Path) -> None:
    """Refuse a path at which no file can be written, before any work is done for it.

    Raises:
        RunError: if it is a folder, or its folder is missing, or either may not be written to.
    """
    _refuse_folder(path)
    if not path.parent.is_dir():
        raise RunError(f"{path} can't be written: there is no folder {path.parent}.")
    for place in (path.parent, path):
        if place.exists() and not os.access(place, os.W_OK):
            raise RunError(f"{path} can't be written: permission denied.")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it takes the place of ``path`` for good.

    The file's bytes reach the disk before its name does (fsync, rename, fsync of the folder), so
    after a crash ``path`` holds either the old bytes or the new ones, all of them.

    Raises:
        RunError: if it can't be written.
    """
    _refuse_folder(path)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with naming_disk_errors(path):
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
            _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise RunError(f"{path} can't be written: it is a folder, give the name of a file.")


def _sync(path: Path) -> None:
    """Wait until the file, or the folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        RunError: if it is not there or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path} can't be read: {(error.strerror or '').lower()}.") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not a JSON file: it was cut short or changed.") from error


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
