"""The campaign: ``python -m faults --fault NAME --times N --seed S``; one JSON line for each fault."""

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path

import torch

from faults import fuzz
from faults.lab import Lab
from faults.strikes import STRIKES, NotPossibleError
from faults.sweep import kill_sweep

PER_RUN = 5
"""Strikes on one run before it is let to its end and compared."""


def strike(name: str, times: int, seed: int, folder: Path) -> tuple[int, int]:
    """Let a fault hit tiny runs so many times; (times it hit, times nothing was lost)."""
    lab, draw = Lab(folder), random.Random(seed)
    tried = survived = 0
    for place in range(10 * times):  # a strike may come when the run is over
        out, struck = folder / f"run-{place}", 0
        for _ in range(min(PER_RUN, times - tried)):
            struck += STRIKES[name](lab, out, draw)
            if lab.ended(out):
                break
        same = lab.ends_the_same(out)
        tried, survived = tried + struck, survived + struck * same
        if tried >= times:
            break
    return tried, survived


def bad_bytes(times: int, seed: int, folder: Path) -> tuple[int, int]:
    """As many cases of each kind of bad bytes; the first that fails is raised."""
    os.chdir(folder)
    kinds = fuzz.campaigns(folder)
    for check, strategies in kinds.values():
        fuzz.fuzz(check, strategies, times, seed)
    return times * len(kinds), times * len(kinds)


def run(name: str, times: int, seed: int) -> dict[str, object]:
    """One fault in a folder of its own, as a line of the log."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder, line = Path(made), {"fault": name, "seed": seed}
        try:
            if name == "bad-bytes":
                tried, survived = bad_bytes(times, seed, folder)
            elif name == "kill-sweep":
                tried, survived = kill_sweep(folder, times, seed)
            else:
                tried, survived = strike(name, times, seed, folder)
        except NotPossibleError as error:
            return {**line, "skipped": str(error)}
    seconds = round(time.monotonic() - began, 1)
    return {
        **line,
        "tried": tried,
        "survived": survived,
        "lost": tried - survived,
        "seconds": seconds,
    }


def main() -> None:
    """Run what is asked for; exit with 1 where anything was lost."""
    names = [*STRIKES, "kill-sweep", "bad-bytes"]
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--fault", choices=names, action="append", help="all, unless named")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, default=Path("faults.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    log, lost = options.log.absolute(), 0
    for name in options.fault or names:
        line = run(name, options.times, options.seed)
        lost += line.get("lost", 0)
        print(json.dumps(line), flush=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    raise SystemExit(min(lost, 1))


if __name__ == "__main__":
    main()
