"""The text files of a corpus, their words, and the vocabulary that numbers the words."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from undrop.errors import DataError, OptionError

SPLITS = ("train", "valid", "test")
"""The three parts of every corpus, in the order in which undrop shows them."""

EOS = "<eos>"
"""The token at the end of every line."""

UNK = "<unk>"
"""The token that replaces every word outside the vocabulary."""

_MIN_VOCAB = 3  # <eos>, <unk> and a word


class _Index(dict[str, int]):
    """The number of each word of the vocabulary; any other word has the number of ``<unk>``."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(zip(words, range(len(words)), strict=True))
        self.unknown = self.get(UNK)

    def __missing__(self, word: str) -> int:
        if self.unknown is None:
            raise DataError(
                f"the word {word!r} is not in the vocabulary, and there is no {UNK} to replace it."
            )
        return self.unknown


class Vocabulary:
    """The words of a training split, the most frequent first.

    A word's number is its rank, as an adaptive softmax needs it.

    Args:
        words: the words, or a file with one word per line. The file is read when a word is first
            needed, because reading it is the slowest part of opening a large corpus.
        size: the number of words in the file.
    """

    def __init__(self, words: Iterable[str] | Path, size: int | None = None) -> None:
        self._source = words if isinstance(words, Path) else tuple(words)
        self._size = size

    @classmethod
    def from_counts(
        cls, counts: Mapping[str, int], *, max_vocab: int | None = None, others: Iterable[str] = ()
    ) -> Vocabulary:
        """Build the vocabulary of a training split.

        Words are ranked by their count, and words of equal count by their first occurrence. With
        ``max_vocab`` the rarest words become ``<unk>``, and their counts are added to that of
        ``<unk>``; ``<eos>`` and ``<unk>`` stay, whatever their rank. If the training split has no
        ``<unk>``, it is added as the last word if ``others`` has a word that needs it.

        Args:
            counts: how often each word occurs, in the order of first occurrence.
            max_vocab: the largest number of words, ``<eos>`` and ``<unk>`` included.
            others: the words of the other splits.
        """
        if max_vocab is not None and max_vocab < _MIN_VOCAB:
            raise OptionError(f"max_vocab must be at least {_MIN_VOCAB}, got {max_vocab}.")
        counts = {**counts, EOS: counts.get(EOS, 0)}
        if UNK not in counts and any(word not in counts for word in others):
            counts = {**counts, UNK: 0}
        if max_vocab is not None and len(counts) > max_vocab:
            counts = _truncate(counts, max_vocab)
        return cls(sorted(counts, key=counts.__getitem__, reverse=True))

    @cached_property
    def words(self) -> tuple[str, ...]:
        """All words, ordered by their numbers."""
        if isinstance(self._source, tuple):
            return self._source
        try:
            words = tuple(self._source.read_text(encoding="utf-8").split("\n"))
        except (OSError, ValueError):
            words = ()
        if len(words) != self._size:
            raise DataError(
                f"{self._source} was changed: it should have {self._size} words; delete "
                f"{self._source.parent} to encode the corpus again."
            )
        return words

    @property
    def size(self) -> int:
        """The number of words."""
        return len(self.words) if self._size is None else self._size

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The number of each word; any other word has the number of ``<unk>``, if there is one."""
        return _Index(self.words)

    @cached_property
    def sha256(self) -> str:
        """The checksum of the words in order; equal vocabularies have equal checksums."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    def encode(self, text: str | Iterable[str]) -> NDArray[np.int64]:
        """Return the number of each word; a string is split at white space."""
        words = text.split() if isinstance(text, str) else list(text)
        return np.fromiter(map(self.index.__getitem__, words), dtype=np.int64, count=len(words))

    def decode(self, tokens: Iterable[SupportsIndex]) -> list[str]:
        """Return the words with these numbers.

        Raises:
            DataError: if a number is out of range.
        """
        try:
            return [self.words[token] for token in tokens]
        except IndexError as error:
            raise DataError(
                f"a token is out of range for a vocabulary of {self.size} words."
            ) from error

    def __len__(self) -> int:
        return self.size

    def __contains__(self, word: object) -> bool:
        return word in self.index

    def __repr__(self) -> str:
        return f"Vocabulary({self.size:,} words)"


def _truncate(counts: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the counts of the ``size`` most frequent words, including ``<eos>`` and ``<unk>``."""
    special = (EOS, UNK)
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)
    frequent = {EOS, *[word for word in ranked if word not in special][: size - len(special)]}
    kept = {word: count for word, count in counts.items() if word in frequent}
    return {**kept, UNK: sum(counts.values()) - sum(kept.values())}


_CHUNK = 4 << 20  # bytes, which take about 50 MB of memory as words
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
        folder: the folder to search.
        exact: the preferred file name of each split.

    Raises:
        DataError: if a split is missing, or more than one file fits.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: a corpus is a folder of text files.")
    return {split: _split_file(folder, split, (exact or {}).get(split)) for split in SPLITS}


def _split_file(folder: Path, split: str, exact: str | None) -> Path:
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


def read_words(path: Path, limit: int | None = None) -> Iterator[list[str]]:
    """Yield the words of a text file in lists of a few megabytes, with ``<eos>`` after each line.

    White space separates words. Empty lines also end with ``<eos>``.

    Args:
        path: a UTF-8 text file.
        limit: stop after this number of words, ``<eos>`` included.

    Raises:
        DataError: if the file has no words or is not UTF-8.
    """
    empty = True
    for text in _decoded_pieces(path):
        chunk = text.replace("\n", f" {EOS}\n").split()
        empty = empty and all(word == EOS for word in chunk)
        if limit is not None:
            chunk = chunk[:limit]
            limit -= len(chunk)
        yield chunk
        if limit == 0:
            return
    if empty:
        raise DataError(f"{path} is empty: a split must have at least one word.")


def _decoded_pieces(path: Path) -> Iterator[str]:
    """Decode the pieces of a file, without the byte order mark."""
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
    """Read a file in pieces that end between words; the last piece ends with a line break."""
    rest, complete = (
        b"",
        True,
    )  # the bytes after the last piece, and whether the last line is complete
    try:
        with path.open("rb") as file:
            while block := file.read(_CHUNK):
                rest += block
                end = 1 + max(rest.rfind(b"\n"), rest.rfind(b" "))
                yield rest[:end]
                rest, complete = rest[end:], rest.endswith(b"\n")
    except OSError as error:
        raise DataError(f"{path} can't be read: {(error.strerror or 'error').lower()}.") from error
    if not complete:
        yield rest + b"\n"
