"""Atomic writes, locks and checksums of files.

After a crash, a file is either the old one or the new one, never half written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from undrop.errors import RunError

TEMPORARY = ".tmp"
"""The suffix of a file that is being written; a file that a crash leaves behind can be deleted."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def naming_disk_errors(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` in the block into a ``RunError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise RunError(
                f"the disk is full: {path} could not be written; nothing written earlier is lost; "
                "free some space and try again (a training run continues with --resume)."
            ) from error
        reason = (error.strerror or str(error)).lower()
        raise RunError(f"{path} can't be written: {reason}.") from error


def check_writable(path: Path) -> None:
    """Refuse a path that can't be written, so that an error comes before the work and not after it.

    Raises:
        RunError: if the path is a folder, or its folder is missing, or permission is denied.
    """
    _refuse_folder(path)
    if not path.parent.is_dir():
        raise RunError(f"{path} can't be written: there is no folder {path.parent}.")
    for target in (path.parent, path):
        if target.exists() and not os.access(target, os.W_OK):
            raise RunError(f"{path} can't be written: permission denied.")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end of the block, that file replaces ``path``.

    The file's bytes reach the disk before its name does (fsync, rename, fsync of the folder), so
    after a crash ``path`` holds either all the old bytes or all the new ones.

    Raises:
        RunError: if the file can't be written.
    """
    _refuse_folder(path)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with naming_disk_errors(path):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise RunError(f"{path} can't be written: it is a folder; give the name of a file.")


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the list of names of a folder, are on the disk."""
    if path.is_dir() and os.name != "posix":  # only POSIX systems can open a folder
        return
    # Windows syncs only files that are open for writing.
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, completely or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def near_path(path: Path, pattern: str = "*") -> Path | None:
    """Return the path whose name is most similar to that of a missing ``path``, in the same folder."""
    neighbors = {neighbor.name: neighbor for neighbor in path.parent.glob(pattern)}
    near = get_close_matches(path.name, neighbors, n=1)
    return neighbors[near[0]] if near else None


def read_json(path: Path) -> Any:
    """Read a JSON file; raise a ``RunError`` if the file does not exist or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = None if path.exists() else near_path(path)
        guess = f" Did you mean {near}?" if near else ""
        raise RunError(f"{path} can't be read: {(error.strerror or '').lower()}.{guess}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not a JSON file, or it was truncated or modified.") from error


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 18):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def file_lock(path: Path, *, timeout: float = -1.0) -> Iterator[bool]:
    """Hold a lock on ``path`` within the block; yield whether this process got it.

    The operating system releases the lock when the process ends, however it ends.

    Args:
        path: the lock file; it stays on the disk.
        timeout: seconds to wait for another process to release the lock; negative waits forever.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=timeout, poll_interval=0.02)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
