"""A small corpus on disk, a new cache for every test, and the real corpora if they are present."""

import os
from pathlib import Path

import pytest

TEXTS = {
    "train": "the cat sat on the mat\n\nthe dog sat on the cat\n",
    "valid": "the cat sat\n",
    "test": "the dog sat on the mat\n",
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("UNDROP_CACHE", str(folder))
    return folder


@pytest.fixture
def write(tmp_path):
    """Write the text files of a corpus, by default the small one, and return their folder."""

    def write(name="small", suffix=".txt", **texts):
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        for split, text in (TEXTS | texts).items():
            if text is not None:
                data = text if isinstance(text, bytes) else text.encode()
                (folder / f"{split}{suffix}").write_bytes(data)
        return folder

    return write


@pytest.fixture(scope="session")
def real_data():
    """The folder that has ptb and wikitext-2."""
    beside = Path(__file__).resolve().parents[4] / "shared" / "data"
    folder = Path(os.environ.get("UNDROP_TEST_DATA", beside))
    if not (folder / "ptb").is_dir():
        pytest.skip(f"no corpora in {folder}: set UNDROP_TEST_DATA to a folder that has them")
    return folder
