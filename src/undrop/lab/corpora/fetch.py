"""Downloading a corpus: checksums, mirrors in turn, a progress bar, archives opened safely."""

from __future__ import annotations

import logging
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from undrop.errors import DataError
from undrop.lab.corpora.cache import publishing
from undrop.lab.corpora.catalogue import Download, Entry, Mirror

__all__ = ["fetch"]

_SCHEMES = ("https",)
_TIMEOUT = 30.0  # seconds without an answer before the next mirror is tried


def fetch(entry: Entry, folder: Path) -> None:
    """Download a corpus's text files into ``folder``, which is there whole or not at all.

    Raises:
        DataError: if no mirror gives the right bytes, or the folder can't be written.
    """
    _require_pooch()
    with publishing(folder) as temporary:
        for download in entry.downloads:
            _retrieve(entry, download, temporary)
        missing = [name for name in entry.files.values() if not (temporary / name).is_file()]
        if missing:
            raise DataError(
                f"the download of {entry.name} has no {', '.join(missing)}: get the files yourself "
                "and name their folder by --data-dir."
            )


def _require_pooch() -> None:
    try:
        import pooch  # noqa: F401
        import requests  # noqa: F401
    except ImportError as error:
        raise DataError(
            "downloading needs the pooch library: install it by pip install 'undrop[data]', or "
            "name a folder that has the files by --data-dir."
        ) from error


def _retrieve(entry: Entry, download: Download, folder: Path) -> None:
    """Put what the first good mirror has of the corpus's files into ``folder``."""
    failures = []
    for mirror in download.mirrors:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            try:
                file = _from(mirror, Path(scratch))
            except DataError as error:
                failures.append(f"{urlsplit(mirror.url).netloc} {error}")
                continue
            _unpack(file, folder, wanted=set(entry.files.values()))
            return
    reasons = "; ".join(dict.fromkeys(failures))
    raise DataError(
        f"{entry.name} could not be downloaded ({reasons}): try again later, or get the files "
        "yourself and name their folder by --data-dir."
    )


def _from(mirror: Mirror, folder: Path) -> Path:
    """The file of one mirror, with the right checksum.

    Raises:
        DataError: with what the mirror did, as the end of a sentence about it.
    """
    import pooch
    import requests

    parts = urlsplit(mirror.url)
    if parts.scheme not in _SCHEMES:
        raise DataError(f"was not asked: {parts.scheme} is not safe")
    pooch.get_logger().setLevel(logging.ERROR)
    name = Path(parts.path).name
    bar = _Bar(name)
    try:
        pooch.retrieve(
            mirror.url,
            known_hash=mirror.checksum,
            fname=name,
            path=folder,
            downloader=pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 18, timeout=_TIMEOUT),
        )
    except requests.HTTPError as error:
        status = "with an error" if error.response is None else error.response.status_code
        raise DataError(f"answered {status}") from error
    except requests.RequestException as error:
        raise DataError("could not be reached") from error
    except ValueError as error:  # how pooch says that the checksum differs
        raise DataError("sent a file with the wrong checksum") from error
    finally:
        bar.close()
    return folder / name


class _Bar:
    """A rich progress bar on stderr with the four things that pooch asks of one."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        self._progress = Progress(
            f"[bold]{name}",
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(name, total=None)
        self._progress.start()

    @property
    def total(self) -> float | None:
        return self._progress.tasks[0].total

    @total.setter
    def total(self, value: float | None) -> None:
        self._progress.update(self._task, total=value)

    def update(self, amount: float) -> None:
        self._progress.advance(self._task, amount)

    def reset(self) -> None:
        self._progress.reset(self._task, total=self.total)

    def close(self) -> None:
        self._progress.stop()


def _unpack(file: Path, folder: Path, wanted: set[str]) -> None:
    """Copy the wanted files to ``folder``: out of an archive, or the file itself.

    What an archive says of paths, links and modes is never used: a member is copied byte by byte
    to its own bare name, and only if that name is wanted.
    """
    try:
        for name, source in _members(file):
            if name in wanted:
                with (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise DataError(f"the archive {file.name} can't be read: {error}.") from error


def _members(file: Path) -> Iterator[tuple[str, IO[Any]]]:
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    with archive.open(info) as source:
                        yield Path(info.filename).name, source
    elif file.name.endswith((".tar.gz", ".tgz")):
        with tarfile.open(file) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() else None
                if content is not None:
                    yield Path(member.name).name, content
    else:
        with file.open("rb") as source:
            yield file.name, source
