"""The time and memory to encode a synthetic corpus of WikiText-103's size, and to open it afterwards.

The corpus has as many tokens and different words as WikiText-103, with frequencies by Zipf's law.
Separate processes encode and open it, and the system reports their peak memory.

    python benchmarks/encode_corpus.py [--tokens 103227021] [--words 267735] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

WORDS_PER_LINE = 56  # with <eos>, as in WikiText-103
BLOCK = 1 << 20

_MEASURED = """
import json, resource, sys, time
from undrop.lab import corpora
start = time.perf_counter()
corpus = corpora.load(sys.argv[1], cache_dir=sys.argv[2])
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
peak *= 1 if sys.platform == "darwin" else 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "tokens": len(corpus.train),
                  "words": corpus.vocabulary.size, "dtype": corpus.header.dtype}))
"""


def make_corpus(folder: Path, tokens: int, words: int) -> None:
    """Write train.txt with the given number of tokens and words, and small valid.txt and test.txt."""
    generator = np.random.default_rng(0)
    lexicon = np.array([f"w{number:x}" for number in range(words - 1)], dtype=object)
    ranks = np.cumsum(1.0 / np.arange(1, words))
    lines = tokens // WORDS_PER_LINE
    sizes = np.full(lines, WORDS_PER_LINE - 1)
    sizes[-1] += tokens - lines * WORDS_PER_LINE
    with (folder / "train.txt").open("w", encoding="utf-8") as file:
        required = lexicon  # each word occurs once at the start, so that none is missing by chance
        for first in range(0, lines, BLOCK // WORDS_PER_LINE):
            block = sizes[first : first + BLOCK // WORDS_PER_LINE]
            draws = generator.uniform(0, ranks[-1], size=int(block.sum()) - len(required))
            block_words = np.concatenate([required, lexicon[np.searchsorted(ranks, draws)]])
            required = lexicon[:0]
            for line in np.split(block_words, np.cumsum(block)[:-1]):
                file.write(" ".join(line) + "\n")
    for split in ("valid", "test"):
        (folder / f"{split}.txt").write_text(" ".join(lexicon[:1000]) + "\n", encoding="utf-8")


def measure(folder: Path, cache: Path) -> dict[str, Any]:
    """Load the corpus in a separate process and return its time and memory."""
    command = [sys.executable, "-c", _MEASURED, str(folder), str(cache)]
    result: dict[str, Any] = json.loads(subprocess.check_output(command))
    return result


def run(tokens: int, words: int) -> dict[str, Any]:
    """Encode a synthetic corpus and open it again."""
    with tempfile.TemporaryDirectory(prefix="undrop-encode-") as scratch:
        folder, cache = Path(scratch) / "synthetic", Path(scratch) / "cache"
        folder.mkdir()
        make_corpus(folder, tokens, words)
        encoding = measure(folder, cache)
        opening = min((measure(folder, cache) for _ in range(3)), key=lambda m: m["seconds"])
    return {"encoding": encoding, "opening": opening}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=103_227_021)
    parser.add_argument("--words", type=int, default=267_735)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run(options.tokens, options.words)
    for what, figures in result.items():
        print(
            f"{what}: {figures['tokens']:,} tokens, {figures['words']:,} words, "
            f"{figures['seconds']:.3f} s, peak {figures['peak_bytes'] / 2**20:.0f} MiB"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
