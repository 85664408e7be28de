"""Load a corpus by its name or from a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from undrop.errors import DataError, OptionError, UnknownNameError
from undrop.lab.corpora.cache import cache_folder
from undrop.lab.corpora.catalogue import CATALOGUE, Entry, fetch, pydocs
from undrop.lab.corpora.encode import Header, Tokens, encode, open_encoded
from undrop.lab.corpora.text import SPLITS, Vocabulary, find_splits

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Corpus:
    """Three splits of tokens, one-dimensional and memory-mapped, and their vocabulary."""

    name: str
    train: Tokens
    valid: Tokens
    test: Tokens
    vocabulary: Vocabulary  # the words of the training split
    header: Header  # counts, checksums and sources
    folder: Path  # of the encoded files

    @property
    def splits(self) -> Mapping[str, Tokens]:
        """The tokens of each split, by its name."""
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
    """Load a corpus; download and encode it first if necessary.

    Tokens are words, with one ``<eos>`` per line. The vocabulary is that of the training split, most
    frequent word first; other words become ``<unk>``. If the training split has no ``<unk>`` but the
    other splits need one, it is added. It is untrained then, which costs perplexity; ``max_vocab``
    trains it on the rarest words instead.

    Args:
        name_or_path: a name of :data:`~undrop.lab.corpora.CATALOGUE`, or a folder with the three splits
            as text files.
        data_dir: read a named corpus from this folder, or from its subfolder of the corpus's name,
            instead of downloading it.
        limit_tokens: use only the first ``limit_tokens`` tokens of the training split, and their
            vocabulary. The other splits keep their length.
        fraction: use only the first part of the training tokens, with the vocabulary of all of them;
            the paper's down-sampled setting is 0.2.
        max_vocab: the largest size of the vocabulary, ``<eos>`` and ``<unk>`` included.
        cache_dir: the folder for downloaded and encoded files.
        download: whether to download the corpus if it is missing.

    Raises:
        DataError: if the corpus can't be found, downloaded, read or written to the cache.
        OptionError: for an unknown name or a value outside its range.
    """
    if limit_tokens is not None and limit_tokens < 1:
        raise OptionError(f"limit_tokens must be at least 1, got {limit_tokens}.")
    if not 0.0 < fraction <= 1.0:
        raise OptionError(f"fraction must lie in (0, 1], got {fraction}.")
    cache = cache_folder(cache_dir)
    parent = None if data_dir is None else Path(data_dir).expanduser()
    name, files = _texts(name_or_path, parent, cache, download)
    folder = encode(name, files, cache, limit_tokens=limit_tokens, max_vocab=max_vocab)
    header, vocabulary, tokens = open_encoded(folder)
    train = tokens["train"][: max(1, int(len(tokens["train"]) * fraction))]
    return Corpus(name, train, tokens["valid"], tokens["test"], vocabulary, header, folder)


def _texts(
    name_or_path: StrPath, data_dir: Path | None, cache: Path, download: bool
) -> tuple[str, dict[str, Path]]:
    """Return the name of the corpus and its text files, after downloading them if necessary."""
    found = find(name_or_path, data_dir)
    if isinstance(found, Entry):
        return found.name, _named(found, data_dir, cache, download)
    return found.resolve().name or "corpus", find_splits(found)


def find(name_or_path: StrPath, data_dir: Path | None = None) -> Entry | Path:
    """Return the catalogue's entry of a name, or else the folder of that path.

    Args:
        name_or_path: as for :func:`load`.
        data_dir: a folder that may contain it.

    Raises:
        UnknownNameError: if the name is neither.
    """
    entry = CATALOGUE.find(str(name_or_path))
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
                f"{entry.name} is not on this machine: get it with undrop data get {entry.name}, or "
                "give a folder that has it as --data-dir."
            )
        fetch(entry, folder)
    return {split: folder / entry.files[split] for split in SPLITS}


def _text_folder(entry: Entry, cache: Path) -> Path:
    return cache / "text" / entry.name


def is_here(entry: Entry, cache_dir: StrPath | None = None) -> bool:
    """Return whether a named corpus can be loaded without a download."""
    return not entry.downloads or _text_folder(entry, cache_folder(cache_dir)).is_dir()
