"""A tiny run, its result without a fault, and the processes that a fault strikes."""

import contextlib
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # loaded before the fork, because loading it takes seconds

from killed_run import work
from tiny_run import bits, tiny_config, write_text
from undrop.errors import StoppedError
from undrop.lab import train

SHORT_RUN = {
    "model": {"layers": 1},
    "objective": {"name": "analytic"},
    "optimizer": {"name": "asgd", "patience": 1, "momentum": 0.5},
    "data": {"variable_length": True, "batch_size": 24, "length": 5},
    "train": {"epochs": 4, "checkpoint_every": 3},
}
"""About twenty short steps that use everything with a state."""

WARM_PROCESSES = multiprocessing.get_context("forkserver")
"""Forks processes that have loaded all modules, in milliseconds instead of seconds."""
WARM_PROCESSES.set_forkserver_preload(
    ["undrop.lab.reproduce.campaign", "torch._dynamo", "faults.lab"]
)


class NotPossibleError(Exception):
    """A fault that is not possible on this machine."""


def stoppable_work(*arguments: Any) -> None:
    """Train until the run ends or is stopped by a signal."""
    with contextlib.suppress(StoppedError):
        work(*arguments)


class Lab:
    """Everything that a fault needs: a config, folders, and the expected result of a run.

    Args:
        folder: the folder for all files.
        sections: settings of the run that override those of the tiny one.
        train_it: a function that starts or resumes the run of a config in a folder.
    """

    def __init__(
        self,
        folder: Path,
        sections: Mapping[str, Mapping[str, Any]] = SHORT_RUN,
        train_it: Callable[[train.Config, Path], object] | None = None,
    ) -> None:
        os.environ["UNDROP_CACHE"] = str(folder / "cache")
        self.folder = folder
        (folder / "text").mkdir(parents=True)
        self.config = tiny_config(write_text(folder / "text"), **sections)
        self._train = train_it or _train_in_process
        self.resume(folder / "whole")
        self.expected = bits(folder / "whole")
        start = time.monotonic()
        self.resume(folder / "timed")  # timed after a first run, which loads the modules
        self.seconds = time.monotonic() - start

    def start(self, out: Path, point: str | None = None, count: int = 0) -> BaseProcess:
        """Start or resume the run in a new process."""
        arguments = (self.config.as_dict(), str(out), point, count)
        process = WARM_PROCESSES.Process(target=stoppable_work, args=arguments)
        process.start()
        return process

    def resume(self, out: Path) -> None:
        """Start or resume the run, and wait for its end."""
        self._train(self.config, out)

    def wait_for_lock(self, out: Path, process: BaseProcess) -> bool:
        """Return whether the process locked the folder before it ended."""
        while process.is_alive():
            if train.RunFolder(out).holder() == str(process.pid):
                return True
            time.sleep(0.005)
        return False

    def ended(self, out: Path) -> bool:
        """Return whether the run in the folder has finished."""
        return (out / "summary.json").exists()

    def ends_the_same(self, out: Path) -> bool:
        """Let the run end; return whether its result equals that of an undisturbed run."""
        self.resume(out)
        leftovers = [path for path in out.rglob("*") if ".tmp" in path.name]
        return bits(out) == self.expected and not leftovers


def _train_in_process(config: train.Config, out: Path) -> object:
    return train.run(config, out=out, resume=True)


Strike = Callable[[Lab, Path, random.Random], int]
"""A function that strikes the run in a folder, and returns how often it hit."""


def campaign(
    lab: Lab,
    strike: Strike,
    times: int,
    seed: int,
    *,
    per_run: int = 5,
    disk: Path | None = None,
) -> tuple[int, int]:
    """Let a fault strike runs; return (strikes that hit, strikes after which nothing was lost).

    Args:
        lab: the run, and its results without a fault.
        strike: the fault.
        times: how often the fault must hit; it may hit a few times more.
        seed: determines when and where the fault strikes.
        per_run: the strikes on a run, after which it may end and is compared.
        disk: the folder for the runs, by default that of the lab.
    """
    draw = random.Random(seed)
    tried = survived = 0
    for number in range(10 * times):  # a strike can come too late and hit nothing
        out, hits = (disk or lab.folder) / f"run-{number}", 0
        while hits < min(per_run, times - tried) and not lab.ended(out):
            hits += strike(lab, out, draw)
        survived += hits * lab.ends_the_same(out)
        tried += hits
        shutil.rmtree(out)
        if tried >= times:
            break
    return tried, survived
