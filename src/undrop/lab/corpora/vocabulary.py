"""The vocabulary: words and their numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from undrop.errors import DataError, OptionError

EOS = "<eos>"
"""The token at the end of every line."""

UNK = "<unk>"
"""The token for every word outside the vocabulary."""

_SMALLEST = 3  # <eos>, <unk> and a word


class _Index(dict[str, int]):
    """The number of each word, and the number of ``<unk>`` for all others."""

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
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = tuple(words)

    @classmethod
    def of(
        cls, counts: Mapping[str, int], *, max_vocab: int | None = None, others: Iterable[str] = ()
    ) -> Vocabulary:
        """Build the vocabulary of a training split.

        Words are ranked by their count, words of equal count by their first occurrence. With
        ``max_vocab`` the rarest words become ``<unk>``, whose count then includes theirs; ``<eos>``
        and ``<unk>`` stay, whatever their rank. If the training split has no ``<unk>``, it is added as
        the last word only if ``others`` need it.

        Args:
            counts: how often each word occurs, in the order of first occurrence.
            max_vocab: the largest number of words, ``<eos>`` and ``<unk>`` included.
            others: the words of the other splits.
        """
        if max_vocab is not None and max_vocab < _SMALLEST:
            raise OptionError(f"max_vocab must be at least {_SMALLEST}, got {max_vocab}.")
        counts = {**counts, EOS: counts.get(EOS, 0)}
        if UNK not in counts and any(word not in counts for word in others):
            counts = {**counts, UNK: 0}
        if max_vocab is not None and len(counts) > max_vocab:
            counts = _shortened(counts, max_vocab)
        return cls(sorted(counts, key=counts.__getitem__, reverse=True))

    @property
    def words(self) -> tuple[str, ...]:
        """All words, ordered by their numbers."""
        return self._words

    @property
    def size(self) -> int:
        """The number of words."""
        return len(self.words)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The number of each word; any other word has the number of ``<unk>``, if there is one."""
        return _Index(self.words)

    @cached_property
    def sha256(self) -> str:
        """The checksum of the words in order; equal vocabularies have equal checksums."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    def encode(self, text: str | Iterable[str]) -> NDArray[np.int64]:
        """Return the numbers of words; a string is split at white space."""
        words = text.split() if isinstance(text, str) else list(text)
        return np.fromiter(map(self.index.__getitem__, words), dtype=np.int64, count=len(words))

    def decode(self, tokens: Iterable[SupportsIndex]) -> list[str]:
        """Return the words of numbers.

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


class StoredVocabulary(Vocabulary):
    """A vocabulary in a file of one word per line, read when a word is first needed.

    Reading hundreds of thousands of words takes longer than everything else when a corpus is opened.

    Args:
        file: the file.
        size: the number of words in it.
    """

    def __init__(self, file: Path, size: int) -> None:
        self._file = file
        self._size = size

    @cached_property
    def words(self) -> tuple[str, ...]:
        """All words, ordered by their numbers."""
        try:
            words = tuple(self._file.read_text(encoding="utf-8").split("\n"))
        except (OSError, ValueError) as error:
            raise self._damaged() from error
        if len(words) != self._size:
            raise self._damaged()
        return words

    @property
    def size(self) -> int:
        """The number of words."""
        return self._size

    def _damaged(self) -> DataError:
        return DataError(
            f"{self._file} was changed, it should have {self._size} words: delete "
            f"{self._file.parent} to encode the corpus again."
        )


def _shortened(counts: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the counts of the ``size`` most frequent words, with ``<eos>`` and ``<unk>``."""
    special = (EOS, UNK)
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)
    frequent = {EOS, *[word for word in ranked if word not in special][: size - len(special)]}
    kept = {word: count for word, count in counts.items() if word in frequent}
    return {**kept, UNK: sum(counts.values()) - sum(kept.values())}
