"""Load a corpus by its name or from a folder: text, encoded as memory-mapped integers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveInt

from undrop.errors import DataError, OptionError, UnknownNameError
from undrop.files import sha256
from undrop.lab.corpora.cache import cache_folder, publish
from undrop.lab.corpora.catalogue import CATALOGUE, Entry, fetch, pydocs
from undrop.lab.corpora.text import SPLITS, Vocabulary, find_splits, words

Tokens = NDArray[np.integer[Any]]
"""A split: one-dimensional, memory-mapped, uint16 or int32."""

_HEADER = "header.json"
_VOCABULARY = "vocabulary.txt"


class _StoredModel(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Split(_StoredModel):
    """What the header says about one split."""

    tokens: PositiveInt  # the number of tokens
    sha256: str  # of the encoded file
    source: str  # the text file
    source_bytes: int
    source_sha256: str


class Header(_StoredModel):
    """The description of an encoded corpus."""

    name: str
    format: Literal[1] = 1  # the version of the format
    dtype: Literal["uint16", "int32"]  # of the tokens, little-endian: uint16 if the vocabulary fits
    vocabulary: PositiveInt  # the number of words
    vocabulary_sha256: str  # of the words in their order
    limit_tokens: int | None  # the limit on training tokens, if any
    max_vocab: int | None  # the limit on words, if any
    splits: dict[str, Split]


def encode(
    name: str,
    files: Mapping[str, Path],
    cache: Path,
    *,
    limit_tokens: int | None = None,
    max_vocab: int | None = None,
) -> Path:
    """Encode the text files of a corpus into a folder of the cache, unless it exists; return the folder.

    The folder's name depends on the files (their paths, lengths and modification times) and on the
    options: another text or option gives another folder. Memory holds a few megabytes of text and the
    vocabulary, whatever the size of the corpus.

    Args:
        name: the name of the corpus.
        files: the text file of each split.
        cache: the cache folder.
        limit_tokens: use only the first ``limit_tokens`` tokens of the training split.
        max_vocab: the maximum size of the vocabulary; see :meth:`Vocabulary.from_counts`.

    Raises:
        DataError: if a file has no words or is not UTF-8, or the cache can't be written.
    """
    folder = cache / "encoded" / f"{name}-{_key(files, limit_tokens, max_vocab)}"
    if _is_intact(folder):
        return folder
    shutil.rmtree(folder, ignore_errors=True)

    def write(temporary: Path) -> None:
        vocabulary = _vocabulary(files, limit_tokens, max_vocab)
        dtype = np.dtype("<u2" if vocabulary.size <= 1 << 16 else "<i4")
        (temporary / _VOCABULARY).write_text("\n".join(vocabulary.words), encoding="utf-8")
        splits = {}
        for split, file in files.items():
            target, limit = temporary / f"{split}.bin", limit_tokens if split == "train" else None
            splits[split] = _encode_split(file, target, vocabulary, dtype, limit)
        header = Header(
            name=name,
            dtype="uint16" if dtype.itemsize == 2 else "int32",
            vocabulary=vocabulary.size,
            vocabulary_sha256=vocabulary.sha256,
            limit_tokens=limit_tokens,
            max_vocab=max_vocab,
            splits=splits,
        )
        (temporary / _HEADER).write_text(header.model_dump_json(indent=2), encoding="utf-8")

    publish(folder, write)
    return folder


def _key(files: Mapping[str, Path], limit_tokens: int | None, max_vocab: int | None) -> str:
    stats = [(str(file.resolve()), file.stat()) for file in files.values()]
    identity = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    made_of = json.dumps([1, identity, limit_tokens, max_vocab])  # 1 is the version of the format
    return hashlib.sha256(made_of.encode()).hexdigest()[:16]


def _vocabulary(
    files: Mapping[str, Path], limit_tokens: int | None, max_vocab: int | None
) -> Vocabulary:
    counts: Counter[str] = Counter()
    for chunk in words(files["train"], limit_tokens):
        counts.update(chunk)
    others: set[str] = set()
    for split in SPLITS[1:]:
        for chunk in words(files[split]):
            others.update(chunk)
    return Vocabulary.from_counts(counts, max_vocab=max_vocab, others=others)


def _encode_split(
    source: Path,
    target: Path,
    vocabulary: Vocabulary,
    dtype: np.dtype[np.integer[Any]],
    limit: int | None,
) -> Split:
    number_of = vocabulary.index.__getitem__
    digest = hashlib.sha256()
    tokens = 0
    with target.open("wb") as file:
        for chunk in words(source, limit):
            encoded = np.fromiter(map(number_of, chunk), dtype=dtype, count=len(chunk)).tobytes()
            digest.update(encoded)
            file.write(encoded)
            tokens += len(chunk)
    return Split(
        tokens=tokens,
        sha256=digest.hexdigest(),
        source=str(source),
        source_bytes=source.stat().st_size,
        source_sha256=sha256(source),
    )


def _is_intact(folder: Path) -> bool:
    """Return whether the folder holds an encoded corpus with all files at their full length."""
    try:
        header = _read_header(folder)
        size = np.dtype(header.dtype).itemsize
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
    except ValueError as error:  # pydantic's errors too
        raise DataError(
            f"{folder / _HEADER} was truncated or modified: delete {folder} to encode the corpus "
            "again."
        ) from error


def open_encoded(folder: Path) -> tuple[Header, Vocabulary, dict[str, Tokens]]:
    """Open the header, the vocabulary and the memory-mapped tokens of each split."""
    header = _read_header(folder)
    vocabulary = Vocabulary(folder / _VOCABULARY, header.vocabulary)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    tokens: dict[str, Tokens] = {
        split: np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r") for split in header.splits
    }
    return header, vocabulary, tokens


def damaged_files(folder: Path) -> list[str]:
    """Return the files of an encoded corpus that do not match their checksums; reads all of them."""
    header, vocabulary, _ = open_encoded(folder)
    checksums = {f"{split}.bin": info.sha256 for split, info in header.splits.items()}
    bad = [name for name, expected in checksums.items() if sha256(folder / name) != expected]
    return bad + [_VOCABULARY] * (vocabulary.sha256 != header.vocabulary_sha256)


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
    frequent word first; other words become ``<unk>``. If only the other splits need an ``<unk>``, it
    is added to the vocabulary but never trained, which raises the perplexity. With ``max_vocab``, it
    stands for the rarest words of the training split and is trained on them.

    Args:
        name_or_path: a name of :data:`~undrop.lab.corpora.CATALOGUE`, or a folder with the three splits
            as text files.
        data_dir: read a named corpus from this folder, or from its subfolder with the corpus's name,
            instead of downloading it.
        limit_tokens: use only the first ``limit_tokens`` tokens of the training split, and their
            vocabulary. The other splits keep their length.
        fraction: use only this share of the training tokens, from the start, with the vocabulary of all
            of them; 0.2 in the paper's down-sampled setting.
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
    parent = None if data_dir is None else Path(data_dir).expanduser()
    found = find(name_or_path, parent)
    if isinstance(found, Entry):
        name, files = found.name, _files_of(found, parent, cache, download)
    else:
        name, files = found.resolve().name or "corpus", find_splits(found)
    folder = encode(name, files, cache, limit_tokens=limit_tokens, max_vocab=max_vocab)
    header, vocabulary, tokens = open_encoded(folder)
    train = tokens["train"][: max(1, int(len(tokens["train"]) * fraction))]
    return Corpus(name, train, tokens["valid"], tokens["test"], vocabulary, header, folder)


def find(name_or_path: StrPath, data_dir: Path | None = None) -> Entry | Path:
    """Return the entry of the catalogue with that name, or else the folder at that path.

    Args:
        name_or_path: as for :func:`load`.
        data_dir: a folder that may contain it.

    Raises:
        UnknownNameError: if there is neither.
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


def _files_of(entry: Entry, data_dir: Path | None, cache: Path, download: bool) -> dict[str, Path]:
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


def is_local(entry: Entry, cache_dir: StrPath | None = None) -> bool:
    """Return whether a named corpus can be loaded without a download."""
    return not entry.downloads or _text_folder(entry, cache_folder(cache_dir)).is_dir()
