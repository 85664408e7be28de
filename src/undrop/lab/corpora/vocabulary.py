"""Words and their numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from undrop.errors import DataError, OptionError

__all__ = ["EOS", "UNK", "StoredVocabulary", "Vocabulary"]

EOS = "<eos>"
"""The token at the end of every line."""

UNK = "<unk>"
"""The token that stands for every word outside the vocabulary."""

_SMALLEST = 3  # <eos>, <unk> and a word


class _Index(dict[str, int]):
    """Numbers of words, with one number for all the others where there is one."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(zip(words, range(len(words)), strict=True))
        self.unknown = self.get(UNK)

    def __missing__(self, word: str) -> int:
        if self.unknown is None:
            raise DataError(
                f"the word {word!r} is not in the vocabulary, which has no {UNK} to stand for it."
            )
        return self.unknown


class Vocabulary:
    """The words of a training split, the most frequent first.

    A word's number is its rank, which is what an adaptive softmax wants.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = tuple(words)

    @classmethod
    def of(
        cls, counts: Mapping[str, int], *, max_vocab: int | None = None, others: Iterable[str] = ()
    ) -> Vocabulary:
        """The vocabulary of a training split.

        Words are ranked by their count, words of equal count by their first occurrence. With
        ``max_vocab`` the rarest ones give way to ``<unk>``, whose count then includes theirs;
        ``<eos>`` and ``<unk>`` stay, whatever their rank. Where nothing in the training split is
        ``<unk>`` it is added, as the last word, only if ``others`` need it.

        Args:
            counts: how often each word occurs, in the order of first occurrence.
            max_vocab: the most words there may be, ``<eos>`` and ``<unk>`` included.
            others: words that are to be encoded besides: those of the other splits.
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
        """Every word at the place of its number."""
        return self._words

    @property
    def size(self) -> int:
        """How many words there are."""
        return len(self.words)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The number of each word; of ``<unk>``, where there is one, for every other word."""
        return _Index(self.words)

    @cached_property
    def sha256(self) -> str:
        """The checksum of the words in their order: two vocabularies with the same are the same."""
        return hashlib.sha256("\n".join(self.words).encode()).hexdigest()

    def encode(self, text: str | Iterable[str]) -> NDArray[np.int64]:
        """The numbers of words: of a string's words, or of the words themselves."""
        words = text.split() if isinstance(text, str) else list(text)
        return np.fromiter(map(self.index.__getitem__, words), dtype=np.int64, count=len(words))

    def decode(self, tokens: Iterable[SupportsIndex]) -> list[str]:
        """The words of numbers.

        Raises:
            DataError: for a number that no word has.
        """
        try:
            return [self.words[token] for token in tokens]
        except IndexError as error:
            raise DataError(f"there are numbers that none of the {self.size} words has.") from error

    def __len__(self) -> int:
        return self.size

    def __contains__(self, word: object) -> bool:
        return word in self.index

    def __repr__(self) -> str:
        return f"Vocabulary({self.size:,} words)"


class StoredVocabulary(Vocabulary):
    """The vocabulary in a file of one word per line, read when a word is first asked for.

    Hundreds of thousands of words take longer to read than all else about a corpus takes to open.

    Args:
        file: the file.
        size: how many words it has.
    """

    def __init__(self, file: Path, size: int) -> None:
        self._file = file
        self._size = size

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Every word at the place of its number."""
        try:
            words = tuple(self._file.read_text(encoding="utf-8").split("\n"))
        except (OSError, ValueError) as error:
            raise self._damaged() from error
        if len(words) != self._size:
            raise self._damaged()
        return words

    @property
    def size(self) -> int:
        """How many words there are."""
        return self._size

    def _damaged(self) -> DataError:
        return DataError(
            f"{self._file} is not the vocabulary of {self._size} words that was written: delete "
            f"{self._file.parent}, and the corpus is encoded anew."
        )


def _shortened(counts: Mapping[str, int], size: int) -> dict[str, int]:
    """The ``size`` most frequent words, ``<eos>`` and ``<unk>`` among them."""
    special = (EOS, UNK)
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)
    frequent = {EOS, *[word for word in ranked if word not in special][: size - len(special)]}
    kept = {word: count for word, count in counts.items() if word in frequent}
    return {**kept, UNK: sum(counts.values()) - sum(kept.values())}
