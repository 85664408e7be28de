"""A corpus as training sees it, and the one way to get it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from undrop.errors import DataError, OptionError, UnknownNameError
from undrop.lab.corpora.cache import cache_folder
from undrop.lab.corpora.catalogue import CATALOGUE, SPLITS, Entry
from undrop.lab.corpora.encode import Header, Tokens, encode, open_encoded
from undrop.lab.corpora.fetch import fetch
from undrop.lab.corpora.folders import find_splits
from undrop.lab.corpora.pydocs import pydocs
from undrop.lab.corpora.vocabulary import Vocabulary

__all__ = ["Corpus", "StrPath", "is_here", "load"]

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Corpus:
    """Three splits of tokens and the words they stand for.

    Attributes:
        name: what it is called.
        train: the training tokens, one-dimensional and memory-mapped.
        valid: the validation tokens.
        test: the test tokens.
        vocabulary: the words of the training split.
        header: counts, checksums and where it all came from.
        folder: where the encoded files are.
    """

    name: str
    train: Tokens
    valid: Tokens
    test: Tokens
    vocabulary: Vocabulary
    header: Header
    folder: Path

    @property
    def splits(self) -> Mapping[str, Tokens]:
        """The tokens of each split by its name."""
        return {"train": self.train, "valid": self.valid, "test": self.test}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {len(tokens):,}" for split, tokens in self.splits.items())
        return f"Corpus({self.name}: {sizes} tokens, {self.vocabulary.size:,} words)"


def load(
    name_or_path: StrPath,
    *,
    data_dir: StrPath | None = None,
    limit_tokens: int | None = None,
    fraction: float = 1.0,
    max_vocab: int | None = None,
    cache_dir: StrPath | None = None,
    download: bool = True,
) -> Corpus:
    """Open a corpus; get and encode it first if that was not done before.

    Word level, one ``<eos>`` per line, the vocabulary of the training split, the most frequent
    word first. Words outside it become ``<unk>``; where the training split has none, one is added
    only if the other splits need it, and being untrained it costs perplexity there: ``max_vocab``
    trains it on the rarest words instead.

    Args:
        name_or_path: a name of :data:`~undrop.lab.corpora.CATALOGUE`, or a folder with the three splits
            as text files.
        data_dir: a folder to read a named corpus from instead of downloading it: either its own
            or the one above, which has it under its name.
        limit_tokens: take only the first so many tokens of the training split, and their
            vocabulary. The other splits keep their length.
        fraction: take only this first part of the training tokens, and keep the vocabulary of all
            of them: the paper's down-sampled setting is 0.2.
        max_vocab: the most words there may be, ``<eos>`` and ``<unk>`` included.
        cache_dir: where to keep what was downloaded and encoded.
        download: whether it may be downloaded.

    Raises:
        DataError: if it can't be found, fetched, read or kept.
        OptionError: for an unknown name or a value outside its range.
    """
    if limit_tokens is not None and limit_tokens < 1:
        raise OptionError(f"limit_tokens must be at least 1, got {limit_tokens}.")
    if not 0.0 < fraction <= 1.0:
        raise OptionError(f"fraction must lie in (0, 1], got {fraction}.")
    cache = cache_folder(cache_dir)
    above = None if data_dir is None else Path(data_dir).expanduser()
    name, files = _texts(name_or_path, above, cache, download)
    folder = encode(name, files, cache, limit_tokens=limit_tokens, max_vocab=max_vocab)
    header, vocabulary, tokens = open_encoded(folder)
    train = tokens["train"][: max(1, int(len(tokens["train"]) * fraction))]
    return Corpus(name, train, tokens["valid"], tokens["test"], vocabulary, header, folder)


def _texts(
    name_or_path: StrPath, data_dir: Path | None, cache: Path, download: bool
) -> tuple[str, dict[str, Path]]:
    """The corpus's name and its text files, which are on this machine afterwards."""
    found = find(name_or_path, data_dir)
    if isinstance(found, Entry):
        return found.name, _named(found, data_dir, cache, download)
    return found.resolve().name or "corpus", find_splits(found)


def find(name_or_path: StrPath, data_dir: Path | None = None) -> Entry | Path:
    """What a name stands for, be it on this machine or not: a corpus of the catalogue, or a folder.

    Args:
        name_or_path: as for :func:`load`.
        data_dir: a folder that may hold it.

    Raises:
        UnknownNameError: if it is neither.
    """
    entry = CATALOGUE.get(str(name_or_path))
    if entry is not None:
        return entry
    path = Path(name_or_path).expanduser()
    if data_dir is not None and (data_dir / path).is_dir():
        path = data_dir / path
    if not path.is_dir() and os.fspath(name_or_path) == path.name:
        hint = ", or give a folder with train, valid and test text files"
        raise UnknownNameError("corpus", str(name_or_path), CATALOGUE, hint)
    return path


def _named(entry: Entry, data_dir: Path | None, cache: Path, download: bool) -> dict[str, Path]:
    if not entry.downloads:
        return pydocs(cache)
    if data_dir is not None:
        own = data_dir / entry.name
        return find_splits(own if own.is_dir() else data_dir, entry.files)
    folder = _text_folder(entry, cache)
    if not folder.is_dir():
        if not download:
            raise DataError(
                f"{entry.name} is not on this machine: get it by undrop data get {entry.name}, or "
                "name a folder that has it by --data-dir."
            )
        fetch(entry, folder)
    return {split: folder / entry.files[split] for split in SPLITS}


def _text_folder(entry: Entry, cache: Path) -> Path:
    return cache / "text" / entry.name


def is_here(entry: Entry, cache_dir: StrPath | None = None) -> bool:
    """Whether a named corpus can be had without a download."""
    return not entry.downloads or _text_folder(entry, cache_folder(cache_dir)).is_dir()
