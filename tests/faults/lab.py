"""A tiny run, its result without a fault, and processes that a fault can hit."""

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

import torch._dynamo  # noqa: F401  # comes with forward mode: loaded here, it is in no victim's time

from killed_run import work
from tiny_run import bits, tiny_config, write_text
from undrop.errors import StoppedError
from undrop.lab import train

SHORT = {
    "model": {"layers": 1},
    "objective": {"name": "analytic"},
    "optimizer": {"name": "asgd", "patience": 1, "momentum": 0.5},
    "data": {"variable_length": True, "batch_size": 24, "length": 5},
    "train": {"epochs": 4, "checkpoint_every": 3},
}
"""About twenty short steps that use everything with a state."""

WARM = multiprocessing.get_context("forkserver")
"""Forks processes from one that has loaded everything: milliseconds instead of seconds."""
WARM.set_forkserver_preload(["undrop.lab.reproduce.campaign", "torch._dynamo", "faults.lab"])


class NotPossibleError(Exception):
    """A fault that is not possible on this machine."""


def stoppable_work(*arguments: Any) -> None:
    """Train until the end or until a stop, which is not an error."""
    with contextlib.suppress(StoppedError):
        work(*arguments)


class Lab:
    """Everything a fault needs: a config, folders, and the result to end with.

    Args:
        folder: the folder for all files.
        sections: settings of the run that override those of the tiny one.
        train_it: trains a config in a folder, or resumes it.
    """

    def __init__(
        self,
        folder: Path,
        sections: Mapping[str, Mapping[str, Any]] = SHORT,
        train_it: Callable[[train.Config, Path], object] | None = None,
    ) -> None:
        os.environ["UNDROP_CACHE"] = str(folder / "cache")
        self.folder = folder
        (folder / "text").mkdir(parents=True)
        self.config = tiny_config(write_text(folder / "text"), **sections)
        self._train = train_it or _train_here
        self.resume(folder / "whole")
        self.whole = bits(folder / "whole")
        began = time.monotonic()
        self.resume(folder / "again")  # the first one loads the modules for all
        self.seconds = time.monotonic() - began

    def start(self, out: Path, point: str | None = None, count: int = 0) -> BaseProcess:
        """Start or resume the run in a new process."""
        arguments = (self.config.as_dict(), str(out), point, count)
        process = WARM.Process(target=stoppable_work, args=arguments)
        process.start()
        return process

    def resume(self, out: Path) -> None:
        """Start or resume the run, and wait for its end."""
        self._train(self.config, out)

    def wait_for_lock(self, out: Path, process: BaseProcess) -> bool:
        """Whether the process locked the folder before it ended."""
        while process.is_alive():
            if train.RunFolder(out).holder() == str(process.pid):
                return True
            time.sleep(0.005)
        return False

    def ended(self, out: Path) -> bool:
        """Whether the run in the folder has finished."""
        return (out / "summary.json").exists()

    def ends_the_same(self, out: Path) -> bool:
        """Let the run end; return whether its files equal those of an undisturbed run."""
        self.resume(out)
        left_over = [path for path in out.rglob("*") if ".tmp" in path.name]
        return bits(out) == self.whole and not left_over


def _train_here(config: train.Config, out: Path) -> object:
    return train.run(config, out=out, resume=True)


Strike = Callable[[Lab, Path, random.Random], int]
"""Strikes a run in a folder, and returns how often it hit."""


def campaign(
    lab: Lab,
    strike: Strike,
    times: int,
    seed: int,
    *,
    per_run: int = 5,
    disk: Path | None = None,
) -> tuple[int, int]:
    """Let a fault hit runs; return (times it hit, times nothing was lost).

    Args:
        lab: the run, and its results without a fault.
        strike: the fault.
        times: how often it must hit; it may hit a few times more.
        seed: decides when and where it hits.
        per_run: strikes on a run before the run ends and is compared.
        disk: the folder that contains the folders of the runs.
    """
    draw = random.Random(seed)
    tried = survived = 0
    for place in range(10 * times):  # a strike may come when the run is over
        out, struck = (disk or lab.folder) / f"run-{place}", 0
        while struck < min(per_run, times - tried) and not lab.ended(out):
            struck += strike(lab, out, draw)
        survived += struck * lab.ends_the_same(out)
        tried += struck
        shutil.rmtree(out)
        if tried >= times:
            break
    return tried, survived
