"""Kill a parallel ``undrop reproduce``: all its processes, while it writes a record, or one worker."""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import killed_run
from faults.lab import WARM_PROCESSES, NotPossibleError
from undrop.lab import cli
from undrop.lab.reproduce import records
from undrop.lab.reproduce.campaign import EXECUTORS, Campaign
from undrop.lab.reproduce.worklist import Worklist

EXPERIMENT = "noise-put-back"
JOBS = 2
POINTS = ("fsync", "before rename", "after rename")


def command(folder: str, point: str | None, count: int) -> None:
    """Run the command in a new process group; with a ``point``, it dies in its ``count``-th record."""
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    calls, write = itertools.count(1), records.write_json

    def write_or_die(path: Path, value: Any) -> None:
        if next(calls) == count and point is not None:
            killed_run.arm(point, 1)
        write(path, value)

    records.write_json = write_or_die
    # Forking the workers is safe, because this process has not used torch yet, and it is fast.
    fork = multiprocessing.get_context("fork")
    arguments = ["reproduce", EXPERIMENT, "--scale", "smoke", "--seeds", "1", "--jobs", str(JOBS)]
    with mock.patch("multiprocessing.get_context", return_value=fork):
        os._exit(cli.main([*arguments, "--results", folder]))


def start(folder: Path, point: str | None = None, count: int = 0) -> BaseProcess:
    """Start or resume the sweep."""
    process = WARM_PROCESSES.Process(target=command, args=(str(folder), point, count))
    process.start()
    return process


def bits(folder: Path) -> dict[str, object]:
    """Return the contents of the records, except for their times."""
    contents = {}
    for path in sorted((folder / "records").iterdir()):
        record = json.loads(path.read_text())
        curve = {key: record["curve"][key] for key in ("epoch", "step", "valid_ppl", "train_ppl")}
        outcome = {key: record[key] for key in ("config", "best_valid_ppl", "test_ppl", "steps")}
        contents[path.name] = {**outcome, "curve": curve}
    return contents


def finish(folder: Path) -> None:
    """Start or resume the sweep, and wait until it ends."""
    process = start(folder)
    process.join()
    assert process.exitcode == 0, process.exitcode


def kill_all(process: BaseProcess) -> None:
    """Send SIGKILL to the command and all its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_sweep(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill all processes of a sweep at a random moment; return (kills that hit, kills survived)."""

    def strike(out: Path, draw: Random, seconds: float) -> bool:
        process = start(out)
        process.join(draw.uniform(0.0, seconds))
        kill_all(process)
        process.join()
        return process.exitcode == -signal.SIGKILL

    return _strike_sweeps(strike, folder, times, seed)


def kill_in_record(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill a sweep while it writes one of its records."""

    def strike(out: Path, draw: Random, _: float) -> bool:
        process = start(out, draw.choice(POINTS), draw.randint(1, 2))
        process.join()
        kill_all(process)
        return process.exitcode == -signal.SIGKILL

    return _strike_sweeps(strike, folder, times, seed)


def _strike_sweeps(
    strike: Callable[[Path, Random, float], bool], folder: Path, times: int, seed: int
) -> tuple[int, int]:
    """Strike each sweep up to three times, let it end, and compare; return (hits, hits survived)."""
    os.environ["UNDROP_CACHE"] = str(folder / "cache")
    draw, whole = Random(seed), folder / "whole"
    finish(whole)
    start_time = time.monotonic()
    finish(folder / "timed")
    seconds, expected = time.monotonic() - start_time, bits(whole)
    tried = survived = 0
    for number in range(10 * times):
        out = folder / f"killed-{number}"
        hits = sum(strike(out, draw, seconds) for _ in range(min(3, times - tried)))
        finish(out)
        same = bits(out) == expected and not list((out / "runs").iterdir())
        tried, survived = tried + hits, survived + hits * same
        if tried >= times:
            break
    return tried, survived


def _busy_ray_workers() -> list[int]:
    """Return the ids of the processes that work on a task of this process's Ray cluster."""
    import psutil

    busy = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has ended in the meantime
            if "".join(process.cmdline()).startswith("ray::execute_run"):
                busy.append(process.pid)
    return busy


def kill_ray_worker(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill busy workers of sweeps on Ray at random moments; return (kills, kills survived)."""
    try:
        import ray
    except ImportError as error:
        raise NotPossibleError("ray is not installed") from error
    os.environ["UNDROP_CACHE"] = str(folder / "cache")
    ray.init(num_cpus=JOBS, include_dashboard=False, log_to_driver=False)
    draw, tried, survived = Random(seed), 0, 0
    try:
        _sweep_on_ray(folder / "whole")
        expected = bits(folder / "whole")
        for number in range(10 * times):
            out = folder / f"killed-{number}"
            hits = _sweep_on_ray_with_kills(out, draw, min(5, times - tried))
            same = bits(out) == expected and not list((out / "runs").iterdir())
            tried, survived = tried + hits, survived + hits * same
            if tried >= times:
                break
    finally:
        ray.shutdown()
    return tried, survived


def _sweep_on_ray(out: Path) -> None:
    """Run a sweep until its end. Ray restarts a task once; running the campaign again resumes others."""
    while Campaign(Worklist([EXPERIMENT], "smoke", 1), out, EXECUTORS["ray"](JOBS)).run():
        pass


def _sweep_on_ray_with_kills(out: Path, draw: Random, max_kills: int) -> int:
    """Run a sweep while its busy workers are killed; return how many were killed."""
    finished, killed = threading.Event(), []

    def strike() -> None:
        while len(killed) < max_kills and not finished.wait(draw.uniform(0.0, 1.0)):
            if workers := _busy_ray_workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker := draw.choice(workers), signal.SIGKILL)
                    killed.append(worker)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        _sweep_on_ray(out)
    finally:
        finished.set()
        thread.join()
    return len(killed)
