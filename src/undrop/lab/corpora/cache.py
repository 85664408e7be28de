"""The cache of texts and encoded corpora, in which every folder is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from undrop.errors import DataError
from undrop.files import TEMPORARY, file_lock, sync


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the cache folder: ``cache_dir``, else ``$UNDROP_CACHE``, else the user's cache."""
    path = cache_dir or os.environ.get("UNDROP_CACHE")
    if path:
        return Path(path).expanduser().absolute()
    return user_cache_path("undrop", appauthor=False)


def publish(folder: Path, fill: Callable[[Path], None]) -> None:
    """Create a folder atomically, unless it exists.

    ``fill`` writes the files into a temporary folder, which gets its final name once all bytes are on
    the disk. If several processes publish the same folder, one process fills it and the others wait.
    Temporary folders of killed processes are removed.

    Args:
        folder: the folder; its name identifies its content.
        fill: a function that writes the files into the folder that it gets.

    Raises:
        DataError: if the cache can't be written.
    """
    temporary = _hidden_sibling(folder, TEMPORARY)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(_hidden_sibling(folder, ".lock")):
            if folder.is_dir():
                return
            _remove_leftovers(folder.parent)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                fill(temporary)
                for path in temporary.iterdir():
                    sync(path)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            sync(folder.parent)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DataError(
            f"the cache folder {folder.parent} can't be written ({reason}): choose another one with "
            "--cache-dir or UNDROP_CACHE."
        ) from error


def _hidden_sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _remove_leftovers(parent: Path) -> None:
    """Remove the temporary folders that no running process is filling."""
    for leftover in parent.glob(f".*{TEMPORARY}"):
        with file_lock(leftover.with_suffix(".lock"), timeout=0.0) as acquired:
            if acquired:
                shutil.rmtree(leftover, ignore_errors=True)
