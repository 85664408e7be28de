"""SIGKILL during ``undrop reproduce``: all of its processes at once, at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

EXPERIMENT = "replace-dropout"


def _start(folder: Path) -> subprocess.Popen:
    words = ["reproduce", EXPERIMENT, "--scale", "smoke", "--seeds", "1", "--jobs", "2"]
    return subprocess.Popen(
        [sys.executable, "-m", "undrop", *words, "--results", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _bits(folder: Path) -> dict[str, object]:
    """What the records say, but for the time it took."""
    bits = {}
    for path in sorted((folder / "records").iterdir()):
        record = json.loads(path.read_text())
        curve = {key: record["curve"][key] for key in ("epoch", "step", "valid_ppl", "train_ppl")}
        outcome = {key: record[key] for key in ("config", "best_valid_ppl", "test_ppl", "steps")}
        bits[path.name] = {**outcome, "curve": curve}
    return bits


def kill_sweep(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill a sweep so many times, each time letting it go on; (kills that hit, those survived)."""
    draw, whole = random.Random(seed), folder / "whole"
    os.environ["UNDROP_CACHE"] = str(folder / "cache")
    began = time.monotonic()
    assert _start(whole).wait() == 0
    seconds = time.monotonic() - began
    tried = survived = 0
    for place in range(2 * times):
        struck, out = 0, folder / f"killed-{place}"
        while tried + struck < times:
            process = _start(out)
            try:
                process.wait(draw.uniform(0.2, 0.9) * seconds)
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                struck += 1
        same = _start(out).wait() == 0 and _bits(out) == _bits(whole)
        tried, survived = tried + struck, survived + struck * same
        if tried >= times:
            break
    return tried, survived
