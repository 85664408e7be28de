"""Run faults: ``python -m faults --fault NAME --times N --seed S`` logs one JSON line per fault."""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from faults import fuzz
from faults.lab import Lab, NotPossibleError, Strike, campaign
from faults.marathon import marathon
from faults.strikes import DISK_STRIKES, STRIKES, small_disk
from faults.sweep import kill_in_record, kill_ray_worker, kill_sweep
from faults.workers import kill_torchrun_worker

Fault = Callable[[Path, int, int], tuple[int, int]]
"""Takes a folder, a number of times and a seed; returns (times tried, times survived)."""


def strike_runs(strike: Strike, folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Let a fault strike tiny runs."""
    return campaign(Lab(folder), strike, times, seed)


def strike_on_small_disk(strike: Strike, folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Let a fault strike tiny runs whose folders are on a small disk."""
    with small_disk(folder / "disk") as disk:
        return campaign(Lab(folder / "lab"), strike, times, seed, disk=disk)


def try_bad_bytes(name: str, folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Try random cases of one kind of bad bytes; raise the first failure."""
    os.chdir(folder)
    fuzz.fuzz(name, fuzz.kinds(folder)[name], times, seed)
    return times, times


FAULTS: dict[str, Fault] = {
    **{name: partial(strike_runs, strike) for name, strike in STRIKES.items()},
    **{name: partial(strike_on_small_disk, strike) for name, strike in DISK_STRIKES.items()},
    "kill-sweep": kill_sweep,
    "kill-in-record": kill_in_record,
    "kill-torchrun-worker": kill_torchrun_worker,
    "kill-ray-worker": kill_ray_worker,
    "marathon": marathon,
}
BAD_BYTES: dict[str, Fault] = {name: partial(try_bad_bytes, name) for name in fuzz.KINDS}


def run(name: str, times: int, seed: int) -> dict[str, object]:
    """Run one fault in a new folder, and return its line for the log."""
    start, line, original_folder = time.monotonic(), {"fault": name, "seed": seed}, Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        try:
            tried, survived = {**FAULTS, **BAD_BYTES}[name](Path(folder), times, seed)
        except NotPossibleError as error:
            return {**line, "skipped": str(error)}
        finally:
            os.chdir(original_folder)
    seconds = round(time.monotonic() - start, 1)
    lost = tried - survived
    return {**line, "tried": tried, "survived": survived, "lost": lost, "seconds": seconds}


def main() -> None:
    """Run the requested faults; exit with 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--fault", choices=[*FAULTS, *BAD_BYTES], action="append")
    selection.add_argument("--bad-bytes", action="store_true", help="every kind of bad bytes")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, default=Path("faults.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    log, lost = options.log.absolute(), 0
    for name in options.fault or (BAD_BYTES if options.bad_bytes else FAULTS):
        line = run(name, options.times, options.seed)
        lost += line.get("lost", 0)
        print(json.dumps(line), flush=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    raise SystemExit(min(lost, 1))


if __name__ == "__main__":
    main()
