"""The paper's check of its Taylor expansion (Appendix A.2), on an LSTM that trains in minutes."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ptb(tmp_path, monkeypatch):
    """The folder with Penn Treebank."""
    beside = ROOT.parent / "shared" / "data"
    folder = Path(os.environ.get("UNDROP_TEST_DATA", beside)) / "ptb"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: set UNDROP_TEST_DATA to a folder that contains ptb")
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_most_of_dropout_is_quadratic_in_a_trained_lstm(ptb, tmp_path):
    path = ROOT / "benchmarks" / "quadratic_share.py"
    spec = importlib.util.spec_from_file_location("quadratic_share", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.set_num_threads(1)
    found = script.quadratic_share(ptb, tmp_path / "run", epochs=6, seconds=60, tokens=40_000)
    explicit = found.explicit
    print(found)
    assert explicit.parts.r_drop.low > 0.0
    assert explicit.quadratic_share.low > 0.8  # as in the paper
    assert explicit.second_order_share.low > 0.9
    assert explicit.quadratic_share.stderr < 0.05
    assert found.implicit.cosine.low > 0.9
