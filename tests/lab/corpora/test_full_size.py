"""A corpus of WikiText-103's size within 1.5 GiB."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_103_million_tokens_are_encoded_in_little_memory_and_opened_fast(tmp_path):
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "encode_corpus.py"
    result = tmp_path / "result.json"
    subprocess.run([sys.executable, str(script), "--json", str(result)], check=True)
    figures = json.loads(result.read_text())
    assert figures["encoding"]["tokens"] == 103_227_021
    assert figures["encoding"]["words"] == 267_735
    assert figures["encoding"]["dtype"] == "int32"
    assert figures["encoding"]["peak_bytes"] < 1.5 * 2**30
    assert figures["opening"]["seconds"] < 0.05
