"""The embedded corpus: the language reference that CPython ships for ``help()``."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from undrop.errors import DataError
from undrop.lab.corpora.cache import publish
from undrop.lab.corpora.catalogue import CATALOGUE, SPLITS
from undrop.lab.corpora.vocabulary import UNK

Paragraph = tuple[str, ...]

_SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}
_RARE = 3  # words with fewer occurrences in the training split are <unk>, as in WikiText
_WORD = re.compile(r"\w+|[^\w\s]")
_UNDERLINE = re.compile(r"\s*([^\w\s])\1{2,}\s*")


def pydocs(cache: Path) -> dict[str, Path]:
    """Return the text files of the corpus, after writing them to the cache if necessary."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python has no pydoc_data.topics, the text of the pydocs corpus: use another "
            "corpus, or a complete Python."
        ) from error
    digest = hashlib.sha256(repr(sorted(topics.items())).encode()).hexdigest()
    folder = cache / "text" / f"pydocs-{digest[:16]}"
    files = CATALOGUE["pydocs"].files

    def fill(temporary: Path) -> None:
        for split, lines in pydocs_text(topics).items():
            text = "".join(f"{line}\n" for line in lines)
            (temporary / files[split]).write_text(text, encoding="utf-8")

    if not folder.is_dir():
        publish(folder, fill)
    return {split: folder / files[split] for split in SPLITS}


def pydocs_text(topics: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the lines of each split: one paragraph per line, lower-case words and punctuation.

    Each topic belongs to one split, with about 80, 10 and 10 percent of the words in the three; the
    choice depends only on the topics. Topics repeat each other's paragraphs. A topic that consists
    mostly of repeated ones goes to the training split, and the validation and test splits drop theirs,
    so that nothing in them occurs in training. Words with fewer than 3 occurrences in the training
    split are ``<unk>``.
    """
    paragraphs = {name: _paragraphs(text) for name, text in topics.items()}
    shared = Counter(p for topic in paragraphs.values() for p in set(topic))
    own = {name: [p for p in topic if shared[p] == 1] for name, topic in paragraphs.items()}
    split_of = _assign(paragraphs, own)
    chosen: dict[str, list[Paragraph]] = {split: [] for split in SPLITS}
    for name in sorted(paragraphs):
        split = split_of[name]
        chosen[split] += paragraphs[name] if split == "train" else own[name]
    counts = Counter(word for paragraph in chosen["train"] for word in paragraph)
    return {
        split: [" ".join(w if counts[w] >= _RARE else UNK for w in paragraph) for paragraph in part]
        for split, part in chosen.items()
    }


def _paragraphs(text: str) -> list[Paragraph]:
    """Return the words of each paragraph, without the lines that underline headings."""
    lines = ("" if _UNDERLINE.fullmatch(line) else line for line in text.lower().split("\n"))
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    return [words for block in blocks if (words := tuple(_WORD.findall(block)))]


def _assign(
    paragraphs: Mapping[str, Sequence[Paragraph]], own: Mapping[str, Sequence[Paragraph]]
) -> dict[str, str]:
    """Assign topics to splits: in a random but fixed order, each to the split that lacks most."""
    size = {name: sum(map(len, topic)) for name, topic in paragraphs.items()}
    kept = {name: sum(map(len, topic)) for name, topic in own.items()}
    repeated = {name for name in size if 2 * kept[name] < size[name]}
    split_of = dict.fromkeys(repeated, "train")
    filled = {"train": sum(size[name] for name in repeated), "valid": 0, "test": 0}
    for name in sorted(size.keys() - repeated, key=lambda n: hashlib.sha256(n.encode()).digest()):
        split_of[name] = min(SPLITS, key=lambda s: (filled[s] + size[name]) / _SHARES[s])
        filled[split_of[name]] += size[name]
    return split_of
