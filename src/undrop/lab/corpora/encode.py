"""Encode text as memory-mapped integer files with a vocabulary and a JSON header."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrop.errors import DataError
from undrop.files import sha256
from undrop.lab.corpora.cache import publish
from undrop.lab.corpora.text import SPLITS, StoredVocabulary, Vocabulary, words

Tokens = NDArray[np.integer[Any]]
"""A split: one-dimensional, memory-mapped, uint16 or int32."""

_FORMAT = 1
_DTYPES = ("uint16", "int32")
_HEADER = "header.json"
_VOCABULARY = "vocabulary.txt"


@dataclass(frozen=True)
class Split:
    """What the header says about one split."""

    tokens: int  # the number of tokens
    sha256: str  # of the encoded file
    source: str  # the text file
    source_bytes: int
    source_sha256: str


@dataclass(frozen=True)
class Header:
    """The description of an encoded corpus."""

    name: str
    format: int  # the version of the format
    dtype: str  # of the tokens, little-endian: uint16 if it is large enough, else int32
    vocabulary: int  # the number of words
    vocabulary_sha256: str  # of the words in their order
    limit_tokens: int | None  # the limit on training tokens, if any
    max_vocab: int | None  # the limit on words, if any
    splits: Mapping[str, Split]


def encode(
    name: str,
    files: Mapping[str, Path],
    cache: Path,
    *,
    limit_tokens: int | None = None,
    max_vocab: int | None = None,
) -> Path:
    """Encode the text files of a corpus into a folder of the cache, unless it exists; return it.

    The folder's name depends on the files (their paths, lengths and modification times) and on the
    options: another text or option gives another folder. Memory holds a few megabytes of text and the
    vocabulary, whatever the size of the corpus.

    Args:
        name: the name of the corpus.
        files: the text file of each split.
        cache: the cache folder.
        limit_tokens: use only the first ``limit_tokens`` tokens of the training split.
        max_vocab: the largest size of the vocabulary; see :meth:`Vocabulary.of`.

    Raises:
        DataError: if a file has no words or is not UTF-8, or the cache can't be written.
    """
    folder = cache / "encoded" / f"{name}-{_key(files, limit_tokens, max_vocab)}"
    if folder.exists():
        if _is_intact(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    publish(folder, lambda temporary: _write(name, files, limit_tokens, max_vocab, temporary))
    return folder


def _write(
    name: str,
    files: Mapping[str, Path],
    limit_tokens: int | None,
    max_vocab: int | None,
    folder: Path,
) -> None:
    """Write the vocabulary, the encoded splits and the header."""
    vocabulary = _vocabulary(files, limit_tokens, max_vocab)
    dtype = np.dtype("<u2" if vocabulary.size <= 1 << 16 else "<i4")
    (folder / _VOCABULARY).write_text("\n".join(vocabulary.words), encoding="utf-8")
    splits = {}
    for split, file in files.items():
        limit = limit_tokens if split == "train" else None
        splits[split] = _encode_split(file, folder / f"{split}.bin", vocabulary, dtype, limit)
    header = Header(
        *(name, _FORMAT, dtype.name, vocabulary.size, vocabulary.sha256, limit_tokens, max_vocab),
        splits=splits,
    )
    (folder / _HEADER).write_text(json.dumps(asdict(header), indent=2), encoding="utf-8")


def _key(files: Mapping[str, Path], limit_tokens: int | None, max_vocab: int | None) -> str:
    stats = [(str(file.resolve()), file.stat()) for file in files.values()]
    identity = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    made_of = json.dumps([_FORMAT, identity, limit_tokens, max_vocab])
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
    return Vocabulary.of(counts, max_vocab=max_vocab, others=others)


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
    return Split(tokens, digest.hexdigest(), str(source), source.stat().st_size, sha256(source))


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
        values = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
        splits = {split: Split(**values["splits"][split]) for split in SPLITS}
        header = Header(**{**values, "splits": splits})
        counts = [header.vocabulary, *(split.tokens for split in splits.values())]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _changed(folder) from error
    counted = all(type(count) is int and count > 0 for count in counts)
    if not counted or header.dtype not in _DTYPES or header.format != _FORMAT:
        raise _changed(folder)
    return header


def _changed(folder: Path) -> DataError:
    return DataError(
        f"{folder / _HEADER} was cut short or changed: delete {folder} to encode the corpus again."
    )


def open_encoded(folder: Path) -> tuple[Header, Vocabulary, dict[str, Tokens]]:
    """Open the header, the vocabulary and the memory-mapped tokens of each split."""
    header = _read_header(folder)
    vocabulary = StoredVocabulary(folder / _VOCABULARY, header.vocabulary)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    tokens: dict[str, Tokens] = {
        split: np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r") for split in header.splits
    }
    return header, vocabulary, tokens


def damaged(folder: Path) -> list[str]:
    """Return the files of an encoded corpus that do not match their checksums; reads all of them."""
    header, vocabulary, _ = open_encoded(folder)
    checksums = {f"{split}.bin": info.sha256 for split, info in header.splits.items()}
    bad = [name for name, expected in checksums.items() if sha256(folder / name) != expected]
    return bad + [_VOCABULARY] * (vocabulary.sha256 != header.vocabulary_sha256)
