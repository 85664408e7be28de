import json
import multiprocessing
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from parallel_step import work
from undrop import train
from undrop.errors import RunError
from undrop.train import RunFolder
from undrop.train.world import World


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def together(size, objective, options, out):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["undrop.train", "torch._dynamo"])
    port = free_port()
    processes = [
        context.Process(target=work, args=(rank, size, port, objective, options, str(out)))
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
def test_two_processes_have_the_gradient_of_one_with_the_same_noise(tmp_path, objective, options):
    two = together(2, objective, options, tmp_path / "two")
    one = together(1, objective, options, tmp_path / "one")
    assert two.keys() == one.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-9, atol=1e-12)
    assert any(value.abs().max() > 1e-3 for name, value in one.items() if "grad/" in name)


def torchrun(arguments, processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(free_port()), "-m", "undrop", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)


def arguments_of(config):
    arguments = ["--data", config.data.name, "--objective", config.objective.name]
    for section in ("model", "data", "optimizer", "train"):
        for key, value in config.as_dict()[section].items():
            if key != "name" and value is not None:
                arguments += ["--set", f"{section}.{key}={json.dumps(value)}"]
    return arguments


def test_torchrun_trains_as_one_process_would_and_goes_on(tiny, tmp_path):
    config = tiny(objective={"name": "none"}, train={"epochs": 2, "precision": "float64"})
    arguments = [*arguments_of(config), "--out", str(tmp_path / "two")]
    half = torchrun([*arguments, "--set", "train.epochs=1"])
    assert half.returncode == 0, half.stderr
    rest = torchrun([*arguments, "--resume", "--json"])
    assert rest.returncode == 0, rest.stderr
    two, one = json.loads(rest.stdout), train.run(config, out=tmp_path / "one")
    assert (two["machine"]["processes"], two["steps"]) == (2, one.steps)
    # Without noise two processes train as one with the whole batch, but for rounding.
    assert two["best_valid_ppl"] == pytest.approx(one.best_valid_ppl, rel=1e-9)
    with pytest.raises(RunError, match="was begun with 2 processes and can't go on"):
        train.run(out=tmp_path / "two", resume=True)


@pytest.mark.slow
def test_several_processes_go_on_to_the_same_bits(tiny, tmp_path):
    config = tiny(objective={"name": "analytic"}, train={"epochs": 2})
    arguments = arguments_of(config)
    for extra in (
        ["--out", str(tmp_path / "whole")],
        ["--out", str(tmp_path / "half"), "--set", "train.epochs=1"],
        ["--out", str(tmp_path / "half"), "--resume"],
    ):
        done = torchrun([*arguments, *extra])
        assert done.returncode == 0, done.stderr
    whole, half = (RunFolder(tmp_path / name).read_best() for name in ("whole", "half"))
    assert all(torch.equal(whole[name], half[name]) for name in whole)


def test_streams_are_shared_without_gap_or_overlap():
    for size in (1, 2, 3, 7):
        shares = [World(rank, size).share(10) for rank in range(size)]
        columns = [column for share in shares for column in range(10)[share]]
        assert columns == list(range(10))
