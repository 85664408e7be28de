"""The embedded corpus: the language reference that every CPython carries for its ``help()``."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from undrop.errors import DataError
from undrop.lab.corpora.cache import publishing
from undrop.lab.corpora.catalogue import CATALOGUE, SPLITS
from undrop.lab.corpora.vocabulary import UNK

__all__ = ["pydocs", "pydocs_text"]

Paragraph = tuple[str, ...]

_SHARES = {"train": 0.8, "valid": 0.1, "test": 0.1}
_RARE = 3  # words seen less often in the training split are <unk>, as in WikiText
_WORD = re.compile(r"\w+|[^\w\s]")
_UNDERLINE = re.compile(r"\s*([^\w\s])\1{2,}\s*")


def pydocs(cache: Path) -> dict[str, Path]:
    """The corpus's text files, written to the cache if they are not there."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python was installed without pydoc_data.topics, the text of the pydocs corpus: "
            "use another corpus, or a complete Python."
        ) from error
    digest = hashlib.sha256(repr(sorted(topics.items())).encode()).hexdigest()
    folder = cache / "text" / f"pydocs-{digest[:16]}"
    if not folder.is_dir():
        with publishing(folder) as temporary:
            for split, lines in pydocs_text(topics).items():
                file = temporary / CATALOGUE["pydocs"].files[split]
                file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {split: folder / CATALOGUE["pydocs"].files[split] for split in SPLITS}


def pydocs_text(topics: Mapping[str, str]) -> dict[str, list[str]]:
    """The lines of each split: one paragraph a line, lower-case words and punctuation marks.

    Whole topics go to one split or another, so that about 80, 10 and 10 percent of the words do;
    which ones depends on the topics alone. Topics repeat each other's paragraphs: one that is
    mostly made of such goes to the training split, and what validation and test topics repeat is
    left out, so that nothing in them was seen in training. Words that the training split has less
    than 3 times are ``<unk>``.
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
    """The words of each paragraph; the lines that only underline a heading are left out."""
    lines = ("" if _UNDERLINE.fullmatch(line) else line for line in text.lower().split("\n"))
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    return [words for block in blocks if (words := tuple(_WORD.findall(block)))]


def _assign(
    paragraphs: Mapping[str, Sequence[Paragraph]], own: Mapping[str, Sequence[Paragraph]]
) -> dict[str, str]:
    """The split of each topic: in a random but fixed order, each to the split that lacks most."""
    size = {name: sum(map(len, topic)) for name, topic in paragraphs.items()}
    kept = {name: sum(map(len, topic)) for name, topic in own.items()}
    repeated = {name for name in size if 2 * kept[name] < size[name]}
    split_of = dict.fromkeys(repeated, "train")
    filled = {"train": sum(size[name] for name in repeated), "valid": 0, "test": 0}
    for name in sorted(size.keys() - repeated, key=lambda n: hashlib.sha256(n.encode()).digest()):
        split_of[name] = min(SPLITS, key=lambda s: (filled[s] + size[name]) / _SHARES[s])
        filled[split_of[name]] += size[name]
    return split_of
