"""Text files as streams of words, a few megabytes at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from undrop.errors import DataError
from undrop.lab.corpora.vocabulary import EOS

__all__ = ["sha256", "words"]

_CHUNK = 4 << 20  # bytes; a word takes some 60 in memory, so a chunk some 50 MB
_BYTE_ORDER_MARK = "\ufeff"


def words(path: Path, limit: int | None = None) -> Iterator[list[str]]:
    """The words of a text file in order, in lists, with ``<eos>`` after every line.

    Words are what white space separates; an empty line is a line.

    Args:
        path: a UTF-8 text file.
        limit: the number of words, ``<eos>`` included, after which to stop.

    Raises:
        DataError: if the file has no words or is not UTF-8.
    """
    empty = True
    for text in _texts(path):
        found = text.replace("\n", f" {EOS}\n").split()
        empty = empty and all(word == EOS for word in found)
        if limit is not None:
            found = found[:limit]
            limit -= len(found)
        yield found
        if limit == 0:
            return
    if empty:
        raise DataError(f"{path} is empty: a split must have at least one word.")


def _texts(path: Path) -> Iterator[str]:
    """Pieces of the file that end between words; the last one ends a line."""
    position = 0
    for piece in _pieces(path):
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 text: byte {position + error.start} can't be decoded; "
                "convert the file to UTF-8."
            ) from error
        yield text if position else text.removeprefix(_BYTE_ORDER_MARK)
        position += len(piece)


def _pieces(path: Path) -> Iterator[bytes]:
    rest, ended = b"", True
    try:
        with path.open("rb") as file:
            while block := file.read(_CHUNK):
                rest += block
                end = 1 + max(rest.rfind(b"\n"), rest.rfind(b" "))
                yield rest[:end]
                rest, ended = rest[end:], rest.endswith(b"\n")
    except OSError as error:
        raise DataError(f"{path} can't be read: {(error.strerror or 'error').lower()}.") from error
    if not ended:
        yield rest + b"\n"


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()
