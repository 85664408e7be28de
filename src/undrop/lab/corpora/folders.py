"""Finding the three text files of a corpus in a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from undrop.errors import DataError
from undrop.lab.corpora.catalogue import SPLITS

__all__ = ["find_splits"]

_CALLED = {
    "train": {"train", "training"},
    "valid": {"valid", "validation", "val", "dev"},
    "test": {"test", "testing"},
}
_TEXT = {"", ".txt", ".text", ".tokens", ".tok", ".raw"}


def find_splits(folder: Path, exact: Mapping[str, str] | None = None) -> dict[str, Path]:
    """The text file of each split in a folder.

    A file is a split's if its name has the split's as one of its words: ``train.txt``,
    ``ptb.train.txt``, ``wiki.train.tokens``, ``my-validation.txt``.

    Args:
        folder: where to look.
        exact: names that come before any other, by split.

    Raises:
        DataError: if a split is missing, or more than one file could be it.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: a corpus is a folder of text files.")
    return {split: _find(folder, split, (exact or {}).get(split)) for split in SPLITS}


def _find(folder: Path, split: str, exact: str | None) -> Path:
    for name in (exact, f"{split}.txt"):
        if name is not None and (folder / name).is_file():
            return folder / name
    found = sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in _TEXT | {f".{name}" for name in _CALLED[split]}
        and _CALLED[split].intersection(re.split(r"[^a-z]+", path.name.lower()))
        and path.is_file()
    )
    if not found:
        raise DataError(
            f"{folder} has no {split} split: put a text file such as {exact or f'{split}.txt'} "
            "there."
        )
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(
            f"{folder} has more than one {split} split ({names}): call the right one {split}.txt."
        )
    return found[0]
