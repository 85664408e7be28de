"""The folder where texts and encoded corpora are kept, and how they get there whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from undrop.errors import DataError

__all__ = ["cache_folder", "publishing"]


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache: ``cache_dir``, else ``$UNDROP_CACHE``, else the platform's place for caches."""
    chosen = cache_dir or os.environ.get("UNDROP_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        default = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        default = Path.home() / "Library" / "Caches"
    else:
        default = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(default) / "undrop"


@contextlib.contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; on success it becomes ``folder``, whole or not at all.

    All bytes reach the disk before the name does. If another process was first with the same name,
    its folder stays and this one is dropped: a name of the cache says all that its bytes depend on.

    Raises:
        DataError: if the place can't be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise _refused(folder.parent, error) from error
    try:
        yield temporary
        for path in temporary.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        _take_name(temporary, folder)
    except OSError as error:
        raise _refused(folder.parent, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take_name(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        return
    folder.chmod(0o755)  # mkdtemp's is for the owner alone, and caches are shared
    if os.name == "posix":  # elsewhere a folder can't be opened
        descriptor = os.open(folder.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _refused(folder: Path, error: OSError) -> DataError:
    reason = (error.strerror or str(error)).lower()
    return DataError(
        f"the cache folder {folder} can't be written ({reason}): name another one by --cache-dir "
        "or UNDROP_CACHE."
    )
