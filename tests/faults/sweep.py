"""A parallel ``undrop reproduce`` that is killed: all of it, while it writes a record, or one worker."""

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
from faults.lab import WARM, NotPossibleError
from undrop.lab import cli
from undrop.lab.reproduce import records
from undrop.lab.reproduce.campaign import EXECUTORS, Campaign
from undrop.lab.reproduce.worklist import Worklist

EXPERIMENT = "noise-put-back"
JOBS = 2
POINTS = ("fsync", "before rename", "after rename")


def command(folder: str, point: str | None, count: int) -> None:
    """The command in a new process group; it may die while it writes its ``count``-th record."""
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    calls, write = itertools.count(1), records.write_json

    def armed(path: Path, value: Any) -> None:
        if next(calls) == count and point is not None:
            killed_run.arm(point, 1)
        write(path, value)

    records.write_json = armed
    # Its workers are forked as well, because this process has not used torch yet.
    fork = multiprocessing.get_context("fork")
    words = ["reproduce", EXPERIMENT, "--scale", "smoke", "--seeds", "1", "--jobs", str(JOBS)]
    with mock.patch("multiprocessing.get_context", return_value=fork):
        os._exit(cli.main([*words, "--results", folder]))


def start(folder: Path, point: str | None = None, count: int = 0) -> BaseProcess:
    """Start or resume the sweep."""
    process = WARM.Process(target=command, args=(str(folder), point, count))
    process.start()
    return process


def bits(folder: Path) -> dict[str, object]:
    """The contents of the records, except for their times."""
    found = {}
    for path in sorted((folder / "records").iterdir()):
        record = json.loads(path.read_text())
        curve = {key: record["curve"][key] for key in ("epoch", "step", "valid_ppl", "train_ppl")}
        outcome = {key: record[key] for key in ("config", "best_valid_ppl", "test_ppl", "steps")}
        found[path.name] = {**outcome, "curve": curve}
    return found


def finish(folder: Path) -> None:
    """Let the sweep end."""
    process = start(folder)
    process.join()
    assert process.exitcode == 0, process.exitcode


def kill_all(process: BaseProcess) -> None:
    """SIGKILL to the command and all its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_sweep(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill every process of a sweep at once, at any moment; return (kills that hit, kills survived)."""

    def strike(out: Path, draw: Random, seconds: float) -> bool:
        process = start(out)
        process.join(draw.uniform(0.0, seconds))
        kill_all(process)
        process.join()
        return process.exitcode == -signal.SIGKILL

    return _strikes(strike, folder, times, seed)


def kill_in_record(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill a sweep while it writes one of its records."""

    def strike(out: Path, draw: Random, _: float) -> bool:
        process = start(out, draw.choice(POINTS), draw.randint(1, 2))
        process.join()
        kill_all(process)
        return process.exitcode == -signal.SIGKILL

    return _strikes(strike, folder, times, seed)


def _strikes(
    strike: Callable[[Path, Random, float], bool], folder: Path, times: int, seed: int
) -> tuple[int, int]:
    """Strike sweeps, up to three times each, let them end and compare; return (hits, hits survived)."""
    os.environ["UNDROP_CACHE"] = str(folder / "cache")
    draw, whole = Random(seed), folder / "whole"
    finish(whole)
    began = time.monotonic()
    finish(folder / "again")
    seconds, expected = time.monotonic() - began, bits(whole)
    tried = survived = 0
    for place in range(10 * times):
        out = folder / f"struck-{place}"
        struck = sum(strike(out, draw, seconds) for _ in range(min(3, times - tried)))
        finish(out)
        same = bits(out) == expected and not list((out / "runs").iterdir())
        tried, survived = tried + struck, survived + struck * same
        if tried >= times:
            break
    return tried, survived


def _ray_tasks() -> list[int]:
    """The processes that work on a task of the Ray cluster that this process started."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "".join(process.cmdline()).startswith("ray::_execute"):
                found.append(process.pid)
    return found


def kill_ray_worker(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill workers of sweeps on Ray, at any moment of their work; return (kills, kills survived)."""
    try:
        import ray
    except ImportError as error:
        raise NotPossibleError("ray is not installed") from error
    os.environ["UNDROP_CACHE"] = str(folder / "cache")
    ray.init(num_cpus=JOBS, include_dashboard=False, log_to_driver=False)
    draw, tried, survived = Random(seed), 0, 0
    try:
        _on_ray(folder / "whole")
        expected = bits(folder / "whole")
        for place in range(10 * times):
            out = folder / f"struck-{place}"
            struck = _struck_on_ray(out, draw, min(5, times - tried))
            same = bits(out) == expected and not list((out / "runs").iterdir())
            tried, survived = tried + struck, survived + struck * same
            if tried >= times:
                break
    finally:
        ray.shutdown()
    return tried, survived


def _on_ray(out: Path) -> None:
    """Run a sweep until its end: Ray restarts a task once, and the same command resumes a failed one."""
    while Campaign(Worklist([EXPERIMENT], "smoke", 1), out, EXECUTORS["ray"](JOBS)).run():
        pass


def _struck_on_ray(out: Path, draw: Random, most: int) -> int:
    """Kill workers with a task while a sweep runs; return how many were killed."""
    over, hits = threading.Event(), []

    def strike() -> None:
        while len(hits) < most and not over.wait(draw.uniform(0.0, 1.0)):
            if tasks := _ray_tasks():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(task := draw.choice(tasks), signal.SIGKILL)
                    hits.append(task)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        _on_ray(out)
    finally:
        over.set()
        thread.join()
    return len(hits)
