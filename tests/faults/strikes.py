"""The faults: each strikes a run, most of them once, and returns how often it hit.

The faults check what must hold at the strike itself (a refusal, a sentence). Afterwards the run ends,
and its bits are compared to see that nothing was lost.
"""

import contextlib
import gc
import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from faults.lab import Lab, NotPossibleError, Strike
from undrop.errors import RunError, UndropError
from undrop.lab.train.environment import Gradient

POINTS = ("fsync", "before rename", "after rename", "in tensors", "in metrics")


def kill(lab: Lab, out: Path, draw: random.Random) -> int:
    """SIGKILL at any moment."""
    process = lab.start(out)
    process.join(draw.uniform(0.0, lab.seconds))
    process.kill()
    process.join()
    return bool(process.exitcode == -signal.SIGKILL)


def kill_in_write(lab: Lab, out: Path, draw: random.Random) -> int:
    """SIGKILL inside a write: at an fsync, around a rename, in half a file, in half a line."""
    process = lab.start(out, draw.choice(POINTS), draw.randint(1, 6))
    process.join()
    return bool(process.exitcode == -signal.SIGKILL)


def terminate(lab: Lab, out: Path, draw: random.Random) -> int:
    """SIGTERM; the run saves its state."""
    process = lab.start(out)
    if lab.wait_for_lock(out, process):
        process.join(draw.uniform(0.0, lab.seconds))
    process.terminate()
    process.join()
    assert process.exitcode in (0, -signal.SIGTERM)
    return not lab.ended(out)


def pause(lab: Lab, out: Path, draw: random.Random) -> int:
    """SIGSTOP, and SIGCONT a little later, a few times."""
    process, hits = lab.start(out), 0
    while lab.wait_for_lock(out, process) and hits < 5:
        process.join(draw.uniform(0.0, 0.3 * lab.seconds))
        if process.is_alive():
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(process.pid, signal.SIGCONT)
            hits += 1
    process.join()
    assert process.exitcode == 0
    return hits


def second_process(lab: Lab, out: Path, draw: random.Random) -> int:
    """Another process on the same folder: it is refused with the pid of the first, which continues."""
    process = lab.start(out)
    refused = False
    if lab.wait_for_lock(out, process):
        process.join(draw.uniform(0.0, 0.3 * lab.seconds))
        os.kill(process.pid, signal.SIGSTOP)  # so that it does not end meanwhile
        if process.is_alive():
            try:
                lab.resume(out)
            except RunError as error:
                refused = f"is in use by process {process.pid}:" in str(error)
            assert refused
        os.kill(process.pid, signal.SIGCONT)
    process.terminate()
    process.join()
    return refused


@contextlib.contextmanager
def _at_step(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Within the block, call ``act`` before the gradient of that step, counted from 0."""
    steps, gradient = itertools.count(), Gradient.__call__

    def struck(*args: object) -> object:
        if next(steps) == number:
            act()
        return gradient(*args)

    with mock.patch.object(Gradient, "__call__", struck):
        yield


def clock_back(lab: Lab, out: Path, draw: random.Random) -> int:
    """The clock goes back by up to a year in the middle of a run that was resumed."""
    now, ahead = time.time, draw.uniform(0.0, 3e7)
    out_of_memory(lab, out, draw)
    for path in [path for path in out.rglob("*") if path.is_file()]:
        os.utime(path, (2e9, draw.uniform(0.0, 4e9)))  # files from the past and from the future

    def clock() -> float:
        return now() + ahead

    def clock_ns() -> int:
        return int(1e9 * clock())

    def go_back() -> None:
        nonlocal ahead
        ahead = 0.0

    with (
        mock.patch("time.time", clock),
        mock.patch("time.time_ns", clock_ns),
        _at_step(draw.randint(0, 15), go_back),
    ):
        lab.resume(out)
    return ahead == 0.0


def _exhaust_graphics() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def _exhaust_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte: the error of the system itself


def out_of_memory(lab: Lab, out: Path, draw: random.Random) -> int:
    """The batch does not fit at some step: the error names it, and what is saved."""
    with _at_step(draw.randint(0, 15), draw.choice((_exhaust_graphics, _exhaust_memory))):
        return _refused(lab, out, "out of memory at step")


def _refused(lab: Lab, out: Path, word: str) -> bool:
    """Whether an error of undrop stops the run; the error must contain the word."""
    said = None
    try:
        lab.resume(out)
    except UndropError as error:
        said = str(error)
    assert said is None or word in said, said
    return said is not None


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A separate file system that has little more room than a run needs."""
    folder.mkdir()
    _system("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        _system("umount", "--lazy", str(folder))  # tensors of a run may still be mapped


def _system(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPossibleError(done.stderr.strip())


def disk_full(lab: Lab, out: Path, draw: random.Random) -> int:
    """A small disk is full at some write."""
    ballast, space = out.parent / "ballast", os.statvfs(out.parent)
    ballast.write_bytes(bytes(space.f_bavail * space.f_frsize - draw.randint(0, 20) * 4096))
    try:
        return _refused(lab, out, "the disk is full")
    finally:
        ballast.unlink()


def read_only(lab: Lab, out: Path, draw: random.Random) -> int:
    """The disk of a run that stopped half-way becomes read-only."""
    out_of_memory(lab, out, draw)
    gc.collect()  # tensors that are still mapped from a file that is gone would keep the disk busy
    _system("mount", "-o", "remount,ro", str(out.parent))
    try:
        return _refused(lab, out, "read-only")
    finally:
        _system("mount", "-o", "remount,rw", str(out.parent))


STRIKES: dict[str, Strike] = {
    strike.__name__.replace("_", "-"): strike
    for strike in (kill, kill_in_write, terminate, pause, second_process, clock_back, out_of_memory)
}
DISK_STRIKES: dict[str, Strike] = {"disk-full": disk_full, "read-only": read_only}
"""Faults that need a small disk."""
