"""A tiny run, its bits when nothing happens to it, and processes that things can happen to."""

import contextlib
import multiprocessing
import os
import time
from pathlib import Path

from killed_run import work
from tiny_run import bits, tiny_config, write_text
from undrop import train
from undrop.errors import StoppedError

SECTIONS = {
    "objective": {"name": "analytic"},
    "optimizer": {"name": "asgd", "patience": 1, "momentum": 0.5},
    "data": {"variable_length": True},
    "train": {"epochs": 6, "checkpoint_every": 4},
}


def stoppable_work(*arguments) -> None:
    """Train until the end or until told to stop, which is no error."""
    with contextlib.suppress(StoppedError):
        work(*arguments)


class Lab:
    """Everything a fault needs: a config, folders, and the bits to end with.

    Args:
        folder: where all is kept.
    """

    def __init__(self, folder: Path) -> None:
        os.environ["UNDROP_CACHE"] = str(folder / "cache")
        self.folder = folder
        (folder / "text").mkdir(parents=True)
        self.config = tiny_config(write_text(folder / "text"), **SECTIONS)
        train.run(self.config, out=folder / "whole")
        began = time.monotonic()
        train.run(self.config, out=folder / "again")
        self.seconds = time.monotonic() - began
        self.whole = bits(folder / "whole")
        self._context = multiprocessing.get_context("forkserver")
        # What every process would load by itself (torch._dynamo comes with forward mode).
        self._context.set_forkserver_preload(["undrop.train", "torch._dynamo"])

    def start(self, out: Path, point: str | None = None, count: int = 0):
        """The run, or what is left of it, in a process of its own."""
        arguments = (self.config.as_dict(), str(out), point, count)
        process = self._context.Process(target=stoppable_work, args=arguments)
        process.start()
        return process

    def resume(self, out: Path) -> None:
        """The run, or what is left of it, in this process."""
        train.run(self.config, out=out, resume=True)

    def wait_for_lock(self, out: Path, process) -> bool:
        """Whether the process came to hold the folder before it ended."""
        while process.is_alive():
            if train.RunFolder(out).holder() == str(process.pid):
                return True
            time.sleep(0.005)
        return False

    def ended(self, out: Path) -> bool:
        """Whether the run there has come to its end."""
        return (out / "summary.json").exists()

    def ends_the_same(self, out: Path) -> bool:
        """Let the run end; whether all it leaves is what it leaves undisturbed, and nothing else."""
        self.resume(out)
        left_over = [path for path in out.rglob("*") if ".tmp" in path.name]
        return bits(out) == self.whole and not left_over
