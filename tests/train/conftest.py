import random

import pytest

from undrop import train


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with three splits of a language whose next word hangs on the last one."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(1)
    words = [f"w{i}" for i in range(30)]
    for split, length in (("train", 600), ("valid", 100), ("test", 100)):
        word, lines = 0, []
        for _ in range(length // 10):
            line = []
            for _ in range(9):
                word = (word * 7 + draw.choice((1, 1, 2, 5))) % len(words)
                line.append(words[word])
            lines.append(" ".join(line))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tiny(text, cache):
    """Makes a config of a run of a second; settings as ``section={key: value}``."""

    def make(**sections):
        settings = {
            "model": {"embedding_size": 8, "hidden_size": 8, "layers": 2},
            "data": {"name": str(text), "batch_size": 4, "eval_batch_size": 4, "length": 10},
            "optimizer": {"lr": 5.0, "clip": 0.35},
            "train": {"epochs": 2, "log_every": 7, "checkpoint_every": 10, "threads": 1},
        }
        for section, values in sections.items():
            settings = train.merge(settings, {section: values})
        return train.Config.parse(settings)

    return make
