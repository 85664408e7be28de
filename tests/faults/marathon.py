"""A run of 100,000 steps that is killed many times and ends bit for bit like an undisturbed run."""

import signal
from pathlib import Path
from random import Random

from faults.lab import Lab

STEPS = 100_000


def sections() -> dict[str, dict[str, object]]:
    """Return settings with the smallest possible model, because only the number of steps matters."""
    return {
        "model": {"embedding_size": 4, "hidden_size": 4, "layers": 1},
        "objective": {"name": "analytic", "interval": 8},
        "optimizer": {"lr": 0.1, "clip": 0.25},
        "data": {"batch_size": 2, "length": 2},
        "train": {"epochs": STEPS, "max_steps": STEPS, "log_every": 100, "checkpoint_every": 100},
    }


def marathon(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill the run at random moments; return (kills, kills survived)."""
    lab, draw, out = Lab(folder, sections()), Random(seed), folder / "killed"
    kills = 0
    while kills < times:
        process = lab.start(out)
        process.join(draw.uniform(0.0, 2.0 * lab.seconds / times))
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            break  # the run ended before the kill
        kills += 1
    return kills, kills * lab.ends_the_same(out)
