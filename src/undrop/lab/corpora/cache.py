"""The folder where texts and encoded corpora are kept, and how they get there whole."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from undrop.errors import DataError

__all__ = ["cache_folder", "publishing"]

_TEMPORARY = re.compile(r"\..+-[a-z0-9_]{8}")  # as mkdtemp makes names


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
    What a killed process had begun beside ``folder`` is removed.

    Raises:
        DataError: if the place can't be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _temporary(folder) as temporary:
            yield temporary
            for path in temporary.iterdir():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            _take_name(temporary, folder)
    except OSError as error:
        raise _refused(folder.parent, error) from error


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A hidden folder beside ``folder``, locked for as long as its process lives and fills it."""
    with contextlib.ExitStack() as held:
        with _locked(folder.parent):  # lest another process sweeps a folder before it is locked
            for left in folder.parent.iterdir():
                if _TEMPORARY.fullmatch(left.name):
                    _remove_if_free(left)
            temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            held.enter_context(_locked(temporary))
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_if_free(folder: Path) -> None:
    with contextlib.suppress(OSError), _locked(folder, wait=False) as locked:
        if locked:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Lock a folder (flock: it goes with the process, however that ends); whether it could be."""
    if os.name != "posix":
        yield False
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            locked = True
        except OSError:  # another process has it, or the file system has no locks
            locked = False
        yield locked
    finally:
        os.close(descriptor)


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
