import multiprocessing
import random
import signal

import pytest

from killed_run import work
from tiny_run import bits
from undrop.errors import CheckpointError
from undrop.lab import train

POINTS = ("fsync", "before rename", "after rename", "in tensors", "in metrics")


def run_with_kills(config, out, kills, seed):
    """Start the run and kill it, ``kills`` times; then let it end. Return how many kills hit it."""
    context = multiprocessing.get_context("forkserver")
    # Otherwise each process would load these modules; forward-mode differentiation loads torch._dynamo.
    context.set_forkserver_preload(["undrop.lab.train", "torch._dynamo"])
    draw, hits = random.Random(seed), 0
    for attempt in range(kills + 1):
        timed = attempt % 3 == 2
        point = None if timed or attempt == kills else POINTS[attempt % len(POINTS)]
        arguments = (config.as_dict(), str(out), point, draw.randint(1, 4))
        process = context.Process(target=work, args=arguments)
        process.start()
        process.join(draw.uniform(0.05, 0.5) if timed and attempt < kills else 60)
        if process.is_alive():
            process.kill()
            process.join()
        hits += process.exitcode == -signal.SIGKILL
    assert process.exitcode == 0
    return hits


@pytest.mark.parametrize(
    ("sections", "kills"),
    [
        (
            {
                "objective": {"name": "analytic"},
                "optimizer": {"name": "asgd", "patience": 1, "momentum": 0.5},
                "data": {"variable_length": True},
                "train": {"epochs": 24, "checkpoint_every": 4},
            },
            24,
        ),
        (
            {
                "objective": {"name": "dropout"},
                "optimizer": {"name": "adam", "lr": 0.01},
                "schedule": {"name": "cosine", "warmup": 5},
                "train": {"epochs": 80, "checkpoint_every": 4, "test": "end"},
            },
            8,
        ),
    ],
    ids=["analytic-asgd", "dropout-adam"],
)
def test_a_run_killed_at_any_moment_is_bit_for_bit_the_same(tiny, tmp_path, sections, kills):
    config = tiny(**sections)
    train.run(config, out=tmp_path / "whole")
    hits = run_with_kills(config, tmp_path / "killed", kills, seed=3)
    assert hits >= 0.85 * kills
    assert bits(tmp_path / "killed") == bits(tmp_path / "whole")


@pytest.mark.parametrize("length", [-1, -(10**30), "x", None])
def test_a_checkpoint_without_a_valid_metrics_length_is_refused(tiny, tmp_path, length):
    config = tiny(train={"epochs": 1})
    train.run(config, out=tmp_path / "run")
    checkpoints = train.RunFolder(tmp_path / "run").checkpoints
    step = checkpoints.steps()[-1]
    checkpoints.save(step, {**checkpoints.load(step), "metrics": length})
    with pytest.raises(CheckpointError, match="does not hold the state of this run"):
        train.run(config, out=tmp_path / "run", resume=True)
