"""Download a corpus: try the mirrors in order, verify checksums, unpack archives safely."""

from __future__ import annotations

import logging
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from undrop.errors import DataError
from undrop.lab.corpora.cache import publish
from undrop.lab.corpora.catalogue import Entry, Mirror
from undrop.report import Bar, Progress

_SCHEMES = ("https",)
_TIMEOUT = 30.0  # seconds without an answer before the next mirror is tried


def fetch(entry: Entry, folder: Path) -> None:
    """Download the text files of a corpus into ``folder``, completely or not at all.

    Raises:
        DataError: if no mirror sends the right bytes, or the folder can't be written.
    """
    _require_pooch()

    def fill(temporary: Path) -> None:
        for mirrors in entry.downloads:
            _retrieve(entry, mirrors, temporary)
        missing = [name for name in entry.files.values() if not (temporary / name).is_file()]
        if missing:
            raise DataError(
                f"the download of {entry.name} has no {', '.join(missing)}: get the files yourself "
                "and give their folder as --data-dir."
            )

    publish(folder, fill)


def _require_pooch() -> None:
    try:
        import pooch  # noqa: F401
        import requests  # noqa: F401
    except ImportError as error:
        raise DataError(
            "downloading needs the pooch library: install it with pip install 'undrop[data]', or "
            "give a folder that has the files as --data-dir."
        ) from error


def _retrieve(entry: Entry, mirrors: Sequence[Mirror], folder: Path) -> None:
    """Download a file from the first mirror that works, and copy the corpus's files out of it."""
    failures = []
    for mirror in mirrors:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            try:
                file = _download(mirror, Path(scratch))
            except DataError as error:
                failures.append(f"{urlsplit(mirror.url).netloc} {error}")
                continue
            _unpack(file, folder, wanted=set(entry.files.values()))
            return
    reasons = "; ".join(dict.fromkeys(failures))
    raise DataError(
        f"{entry.name} could not be downloaded ({reasons}): try again later, or get the files "
        "yourself and give their folder as --data-dir."
    )


def _download(mirror: Mirror, folder: Path) -> Path:
    """Download the file of one mirror and verify its checksum.

    Raises:
        DataError: what the mirror did, to follow its name in a sentence.
    """
    import pooch
    import requests

    parts = urlsplit(mirror.url)
    if parts.scheme not in _SCHEMES:
        raise DataError(f"was not tried: {parts.scheme} is not safe")
    pooch.get_logger().setLevel(logging.ERROR)
    name = Path(parts.path).name
    try:
        with Progress() as progress:
            bar = _PoochBar(progress.bar(name))
            pooch.retrieve(
                mirror.url,
                known_hash=mirror.checksum,
                fname=name,
                path=folder,
                downloader=pooch.HTTPDownloader(
                    progressbar=bar, chunk_size=1 << 18, timeout=_TIMEOUT
                ),
            )
    except requests.HTTPError as error:
        status = "with an error" if error.response is None else error.response.status_code
        raise DataError(f"answered {status}") from error
    except requests.RequestException as error:
        raise DataError("could not be reached") from error
    except ValueError as error:  # pooch's error for a wrong checksum
        raise DataError("sent a file with the wrong checksum") from error
    return folder / name


class _PoochBar:
    """A progress bar with the interface that pooch expects."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self.total = 0.0
        self._bytes = 0.0

    def update(self, amount: float) -> None:
        self._bytes += amount
        known = f"{self._bytes / 1e6:.1f} of {self.total / 1e6:.1f} MB" if self.total else ""
        self._bar.show(self._bytes / self.total if self.total else None, known)

    def reset(self) -> None:
        self._bytes = 0.0

    def close(self) -> None:
        pass


def _unpack(file: Path, folder: Path, wanted: set[str]) -> None:
    """Copy the wanted files to ``folder``: out of an archive, or the file itself.

    The paths, links and modes in an archive are never used: a member is copied byte by byte to its
    bare name, and only if that name is wanted.
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
