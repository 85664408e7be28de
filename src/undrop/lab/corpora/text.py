"""The text files of a corpus: finding them in a folder, and reading them as words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from undrop.errors import DataError
from undrop.lab.corpora.catalogue import SPLITS
from undrop.lab.corpora.vocabulary import EOS

_CHUNK = 4 << 20  # bytes; as words in memory a chunk takes about 50 MB
_BYTE_ORDER_MARK = "\ufeff"
_NAMES = {
    "train": {"train", "training"},
    "valid": {"valid", "validation", "val", "dev"},
    "test": {"test", "testing"},
}
_SUFFIXES = {"", ".txt", ".text", ".tokens", ".tok", ".raw"}


def find_splits(folder: Path, exact: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Find the text file of each split in a folder.

    A file belongs to a split if the split's name is a word of the file's name: ``train.txt``,
    ``ptb.train.txt``, ``wiki.train.tokens``, ``my-validation.txt``.

    Args:
        folder: where to look.
        exact: the name of each split's file to look for first.

    Raises:
        DataError: if a split is missing, or more than one file fits.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: a corpus is a folder of text files.")
    return {split: _find(folder, split, (exact or {}).get(split)) for split in SPLITS}


def _find(folder: Path, split: str, exact: str | None) -> Path:
    for name in (exact, f"{split}.txt"):
        if name is not None and (folder / name).is_file():
            return folder / name
    found = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in _SUFFIXES | {f".{name}" for name in _NAMES[split]}
        and _NAMES[split].intersection(re.split(r"[^a-z]+", path.name.lower()))
        and path.is_file()
    )
    if not found:
        raise DataError(
            f"{folder} has no {split} split: add a text file such as {exact or f'{split}.txt'}."
        )
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(
            f"{folder} has more than one {split} split ({names}): rename the right one to {split}.txt."
        )
    return found[0]


def words(path: Path, limit: int | None = None) -> Iterator[list[str]]:
    """Read the words of a text file in lists, a few megabytes at a time, with ``<eos>`` after each line.

    White space separates words; an empty line counts as a line.

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
    """Read the file in pieces that end between words; the last one ends a line."""
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
