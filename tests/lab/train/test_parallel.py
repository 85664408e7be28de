import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import DistStoreError, HashStore, TCPStore

from parallel_step import work
from tiny_run import bits
from undrop.errors import RunError
from undrop.lab import train
from undrop.lab.train import RunFolder
from undrop.lab.train.environment import World, new_prefix_store


def gradients_of_processes(size, objective, options, out):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["undrop.lab.train", "torch._dynamo"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=work, args=(rank, size, store.port, objective, options, str(out)))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * size
    return load_file(out)


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("none", {}),
        ("analytic", {"engine": "tangent"}),
        ("analytic", {"engine": "antithetic", "samples": 2}),
    ],
    ids=["none", "tangent", "antithetic"],
)
def test_two_processes_compute_the_gradient_of_one_with_the_same_noise(
    tmp_path, objective, options
):
    two = gradients_of_processes(2, objective, options, tmp_path / "two")
    one = gradients_of_processes(1, objective, options, tmp_path / "one")
    assert two.keys() == one.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-9, atol=1e-12)
    assert any(value.abs().max() > 1e-3 for name, value in one.items() if "grad/" in name)


def arguments_of(config):
    """Return the arguments of ``undrop train`` for a config."""
    arguments = ["--data", config.data.name, "--objective", config.objective.name]
    for section in ("model", "data", "optimizer", "train"):
        for key, value in config.as_dict()[section].items():
            if key != "name" and value is not None:
                arguments += ["--set", f"{section}.{key}={json.dumps(value)}"]
    return arguments


def test_torchrun_matches_one_process_and_resumes(launch, tiny, tmp_path):
    config = tiny(objective={"name": "none"}, train={"epochs": 2, "precision": "float64"})
    command = ["-m", "undrop", "train", *arguments_of(config), "--out", tmp_path / "two"]
    launch(*command, "--set", "train.epochs=1")
    summary = launch(*command, "--resume", "--json")
    two, one = json.loads(summary), train.run(config, out=tmp_path / "one")
    assert (two["machine"]["processes"], two["steps"]) == (2, one.steps)
    # Without noise, two processes train as one with the whole batch, up to rounding.
    assert two["best_valid_ppl"] == pytest.approx(one.best_valid_ppl, rel=1e-9)
    with pytest.raises(RunError, match="was started with 2 processes and can't be resumed"):
        train.run(out=tmp_path / "two", resume=True)


@pytest.mark.slow
def test_several_processes_resume_bit_for_bit(launch, tiny, tmp_path):
    config = tiny(objective={"name": "analytic"}, train={"epochs": 2})
    for extra in (
        ["--out", tmp_path / "whole"],
        ["--out", tmp_path / "half", "--set", "train.epochs=1"],
        ["--out", tmp_path / "half", "--resume"],
    ):
        launch("-m", "undrop", "train", *arguments_of(config), *extra)
    whole, half = (RunFolder(tmp_path / name).read_best() for name in ("whole", "half"))
    assert all(torch.equal(whole[name], half[name]) for name in whole)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_worker_and_the_run_is_bit_for_bit_the_same(
    launch, tiny, tmp_path
):
    config = tiny(objective={"name": "analytic"}, train={"epochs": 4, "checkpoint_every": 3})
    killed, command = (
        RunFolder(tmp_path / "killed"),
        ["-m", "undrop", "train", *arguments_of(config)],
    )
    launch(*command, "--out", tmp_path / "whole")

    def kill_worker():
        while not killed.checkpoints.steps():
            time.sleep(0.005)
        os.kill(int(killed.holder()), signal.SIGKILL)

    with ThreadPoolExecutor() as pool:
        kill = pool.submit(kill_worker)
        launch("--max-restarts=1", *command, "--resume", "--out", tmp_path / "killed")
    kill.result()
    assert bits(tmp_path / "killed") == bits(tmp_path / "whole")


def test_processes_divide_the_streams_without_gap_or_overlap():
    for size in (1, 2, 3, 7):
        parts = [World(rank, size).columns(10) for rank in range(size)]
        columns = [column for part in parts for column in range(10)[part]]
        assert columns == list(range(10))


def join_store(store, *ranks, wait=30.0):
    """Return the section of the store that each of three processes gets."""
    with ThreadPoolExecutor() as pool:
        return list(
            pool.map(lambda rank: new_prefix_store(store, rank, 3, timedelta(seconds=wait)), ranks)
        )


def test_restarted_processes_share_a_store_without_old_entries():
    store = HashStore()
    before = join_store(store, 0, 1, 2)
    for rank in (1, 2):  # requests of an earlier launch that no main process answered
        store.set(f"undrop/asks/{rank}", "long ago")
    after = join_store(store, 0, 1, 2)
    for rank, section in enumerate(before):
        section.set(f"address {rank}", "of a killed process")
    assert not any(section.check([f"address {rank}"]) for section in after for rank in range(3))
    after[2].set("address 2", "new")
    assert [section.get("address 2") for section in after] == [b"new"] * 3


def test_a_process_that_does_not_start_is_named():
    with pytest.raises(TimeoutError, match=r"of 3 processes, ranks \[2\] did not start in time"):
        join_store(HashStore(), 0, 1, wait=0.2)
    with pytest.raises(DistStoreError):
        join_store(HashStore(), 1, 2, wait=0.2)
