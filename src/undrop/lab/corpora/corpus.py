"""Load a corpus by its name or from a folder, with the text encoded as memory-mapped integers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveInt

from undrop.errors import DataError, OptionError, UnknownNameError
from undrop.files import sha256
from undrop.lab.corpora.cache import cache_folder, publish
from undrop.lab.corpora.catalogue import CATALOGUE, NamedCorpus, fetch, pydocs
from undrop.lab.corpora.text import SPLITS, Vocabulary, find_splits, read_words

Tokens = NDArray[np.integer[Any]]
"""The tokens of a split: one-dimensional, memory-mapped, uint16 or int32."""

_HEADER = "header.json"
_VOCABULARY = "vocabulary.txt"

_Dtype = Literal["uint16", "int32"]
_STORED: dict[str, np.dtype[np.integer[Any]]]  # how each is stored on every machine: little-endian
_STORED = {"uint16": np.dtype("<u2"), "int32": np.dtype("<i4")}


class _StoredModel(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class SplitHeader(_StoredModel):
    """The description of one encoded split."""

    tokens: PositiveInt  # the number of tokens
    sha256: str  # of the encoded file
    source: str  # the path of the text file
    source_bytes: int
    source_sha256: str


class Header(_StoredModel):
    """The description of an encoded corpus."""

    name: str
    format: Literal[1] = 1  # the version of the format
    dtype: _Dtype  # of the tokens, little-endian; uint16 if it can hold them
    vocabulary: PositiveInt  # the number of words
    vocabulary_sha256: str  # see Vocabulary.sha256
    limit_tokens: int | None  # the limit on training tokens, if any
    max_vocab: int | None  # the limit on words, if any
    splits: dict[str, SplitHeader]


def encode(
    name: str,
    files: Mapping[str, Path],
    cache: Path,
    *,
    limit_tokens: int | None = None,
    max_vocab: int | None = None,
) -> Path:
    """Return the folder of the cache with a corpus in encoded form; encode its text files if necessary.

    The folder's name depends on the files (their paths, lengths and modification times) and on the
    options, so another text or option uses another folder. Encoding needs memory for a few megabytes
    of text and the vocabulary, whatever the size of the corpus.

    Args:
        name: the name of the corpus.
        files: the text file of each split.
        cache: the cache folder.
        limit_tokens: use only the first ``limit_tokens`` tokens of the training split.
        max_vocab: the maximum size of the vocabulary; see :meth:`Vocabulary.from_counts`.

    Raises:
        DataError: if a file has no words or is not UTF-8, or the cache can't be written.
    """
    folder = cache / "encoded" / f"{name}-{_cache_key(files, limit_tokens, max_vocab)}"
    if _is_intact(folder):
        return folder
    shutil.rmtree(folder, ignore_errors=True)

    def write(temporary: Path) -> None:
        counts = Counter(chain.from_iterable(read_words(files["train"], limit_tokens)))
        valid, test = (set(chain.from_iterable(read_words(files[s]))) for s in SPLITS[1:])
        vocabulary = Vocabulary.from_counts(counts, max_vocab=max_vocab, others=valid | test)
        dtype: _Dtype = "uint16" if vocabulary.size <= 1 << 16 else "int32"
        (temporary / _VOCABULARY).write_text("\n".join(vocabulary.words), encoding="utf-8")
        splits = {}
        for split, file in files.items():
            target, limit = temporary / f"{split}.bin", limit_tokens if split == "train" else None
            splits[split] = _encode_split(file, target, vocabulary, dtype, limit)
        header = Header(
            name=name,
            dtype=dtype,
            vocabulary=vocabulary.size,
            vocabulary_sha256=vocabulary.sha256,
            limit_tokens=limit_tokens,
            max_vocab=max_vocab,
            splits=splits,
        )
        (temporary / _HEADER).write_text(header.model_dump_json(indent=2), encoding="utf-8")

    publish(folder, write)
    return folder


def _cache_key(files: Mapping[str, Path], limit_tokens: int | None, max_vocab: int | None) -> str:
    stats = [(str(file.resolve()), file.stat()) for file in files.values()]
    identity = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    options = json.dumps([1, identity, limit_tokens, max_vocab])  # 1 is the version of the format
    return hashlib.sha256(options.encode()).hexdigest()[:16]


def _encode_split(
    source: Path, target: Path, vocabulary: Vocabulary, dtype: _Dtype, limit: int | None
) -> SplitHeader:
    """Write the numbers of the words in ``source`` to ``target``."""
    number_of = vocabulary.index.__getitem__
    digest = hashlib.sha256()
    tokens = 0
    with target.open("wb") as file:
        for chunk in read_words(source, limit):
            encoded = np.fromiter(map(number_of, chunk), _STORED[dtype], len(chunk)).tobytes()
            digest.update(encoded)
            file.write(encoded)
            tokens += len(chunk)
    return SplitHeader(
        tokens=tokens,
        sha256=digest.hexdigest(),
        source=str(source),
        source_bytes=source.stat().st_size,
        source_sha256=sha256(source),
    )


def _is_intact(folder: Path) -> bool:
    """Return whether the folder holds an encoded corpus whose files all have their full length."""
    try:
        header = _read_header(folder)
        size = _STORED[header.dtype].itemsize
        return (folder / _VOCABULARY).is_file() and all(
            (folder / f"{split}.bin").stat().st_size == info.tokens * size
            for split, info in header.splits.items()
        )
    except (OSError, DataError):
        return False


def _read_header(folder: Path) -> Header:
    try:
        header = Header.model_validate_json((folder / _HEADER).read_bytes())
        if header.splits.keys() != set(SPLITS):
            raise ValueError(f"the splits are {', '.join(header.splits)}")
        return header
    except ValueError as error:  # the base class of pydantic's errors
        raise DataError(
            f"{folder / _HEADER} was truncated or modified: delete {folder} to encode the corpus "
            "again."
        ) from error


def open_encoded(folder: Path) -> tuple[Header, Vocabulary, Mapping[str, Tokens]]:
    """Return the header, the vocabulary and the memory-mapped tokens of each split."""
    header = _read_header(folder)
    vocabulary = Vocabulary(folder / _VOCABULARY, header.vocabulary)
    dtype = _STORED[header.dtype]
    tokens = {s: np.memmap(folder / f"{s}.bin", dtype=dtype, mode="r") for s in header.splits}
    return header, vocabulary, tokens


def damaged_files(folder: Path) -> list[str]:
    """Read all files of an encoded corpus, and return those that do not match their checksums."""
    header, vocabulary, _ = open_encoded(folder)
    checksums = {f"{split}.bin": info.sha256 for split, info in header.splits.items()}
    bad = [name for name, expected in checksums.items() if sha256(folder / name) != expected]
    return bad + [_VOCABULARY] * (vocabulary.sha256 != header.vocabulary_sha256)


StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Corpus:
    """A corpus: the memory-mapped tokens of its three splits, and their vocabulary."""

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

    Tokens are words, with an ``<eos>`` at the end of each line. The vocabulary holds the words of the
    training split, the most frequent first; other words become ``<unk>``. If only the other splits
    need an ``<unk>``, the vocabulary has one that is never trained, which raises the perplexity. With
    ``max_vocab``, ``<unk>`` replaces the rarest words of the training split, and is trained on them.

    Args:
        name_or_path: a name of :data:`~undrop.lab.corpora.CATALOGUE`, or a folder with the three splits
            as text files.
        data_dir: a folder to read a named corpus from, instead of downloading it: the folder itself
            or its subfolder with the corpus's name.
        limit_tokens: use only the first ``limit_tokens`` tokens of the training split, and the
            vocabulary of these tokens. The other splits keep their length.
        fraction: use only this share of the training tokens, from the start, with the vocabulary of
            all training tokens; 0.2 in the paper's down-sampled setting.
        max_vocab: the maximum size of the vocabulary, ``<eos>`` and ``<unk>`` included.
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
    data_folder = None if data_dir is None else Path(data_dir).expanduser()
    source = find(name_or_path, data_folder)
    if isinstance(source, NamedCorpus):
        name, files = source.name, _text_files(source, data_folder, cache, download)
    else:
        name, files = source.resolve().name or "corpus", find_splits(source)
    folder = encode(name, files, cache, limit_tokens=limit_tokens, max_vocab=max_vocab)
    header, vocabulary, tokens = open_encoded(folder)
    train = tokens["train"][: max(1, int(len(tokens["train"]) * fraction))]
    return Corpus(name, train, tokens["valid"], tokens["test"], vocabulary, header, folder)


def find(name_or_path: StrPath, data_dir: Path | None = None) -> NamedCorpus | Path:
    """Return the corpus of the catalogue with that name, or else the folder at that path.

    Args:
        name_or_path: as for :func:`load`.
        data_dir: a folder in which a relative path may lie.

    Raises:
        UnknownNameError: if there is neither a corpus nor a folder.
    """
    named = CATALOGUE.find(str(name_or_path))
    if named is not None:
        return named
    path = Path(name_or_path).expanduser()
    if data_dir is not None and (data_dir / path).is_dir():
        path = data_dir / path
    if not path.is_dir() and os.fspath(name_or_path) == path.name:
        hint = ", or give a folder with train, valid and test text files"
        raise UnknownNameError("corpus", str(name_or_path), CATALOGUE, hint)
    return path


def _text_files(
    corpus: NamedCorpus, data_dir: Path | None, cache: Path, download: bool
) -> dict[str, Path]:
    """Return the text file of each split of a named corpus; download the files if necessary."""
    if not corpus.downloads:
        return pydocs(cache)
    if data_dir is not None:
        subfolder = data_dir / corpus.name
        return find_splits(subfolder if subfolder.is_dir() else data_dir, corpus.files)
    folder = _text_folder(corpus, cache)
    if not folder.is_dir():
        if not download:
            raise DataError(
                f"{corpus.name} is not on this machine: get it with undrop data get {corpus.name}, or "
                "give a folder with its files as --data-dir."
            )
        fetch(corpus, folder)
    return {split: folder / corpus.files[split] for split in SPLITS}


def _text_folder(corpus: NamedCorpus, cache: Path) -> Path:
    return cache / "text" / corpus.name


def is_local(corpus: NamedCorpus, cache_dir: StrPath | None = None) -> bool:
    """Return whether a named corpus can be loaded without a download."""
    return not corpus.downloads or _text_folder(corpus, cache_folder(cache_dir)).is_dir()
