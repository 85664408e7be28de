"""The faults. Each one strikes a run, usually once, and returns how often it hit.

A fault checks that undrop reacts as it should, for example with an error message. Afterwards the run is
resumed until its end and compared bit for bit, to see that nothing was lost.
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
    """Send SIGKILL at a random moment."""
    process = lab.start(out)
    process.join(draw.uniform(0.0, lab.seconds))
    process.kill()
    process.join()
    return bool(process.exitcode == -signal.SIGKILL)


def kill_in_write(lab: Lab, out: Path, draw: random.Random) -> int:
    """Send SIGKILL during a write: at an fsync, before or after a rename, within a file or a line."""
    process = lab.start(out, draw.choice(POINTS), draw.randint(1, 6))
    process.join()
    return bool(process.exitcode == -signal.SIGKILL)


def terminate(lab: Lab, out: Path, draw: random.Random) -> int:
    """Send SIGTERM, after which the run saves its state."""
    process = lab.start(out)
    if lab.wait_for_lock(out, process):
        process.join(draw.uniform(0.0, lab.seconds))
    process.terminate()
    process.join()
    assert process.exitcode in (0, -signal.SIGTERM)
    return not lab.ended(out)


def pause(lab: Lab, out: Path, draw: random.Random) -> int:
    """Send SIGSTOP and, a little later, SIGCONT, a few times."""
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
    """Start a second process in the same folder: it is refused, and the first one continues."""
    process = lab.start(out)
    refused = False
    if lab.wait_for_lock(out, process):
        process.join(draw.uniform(0.0, 0.3 * lab.seconds))
        os.kill(process.pid, signal.SIGSTOP)  # otherwise it could end before the second one starts
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

    def act_and_call(*args: object) -> object:
        if next(steps) == number:
            act()
        return gradient(*args)

    with mock.patch.object(Gradient, "__call__", act_and_call):
        yield


def clock_back(lab: Lab, out: Path, draw: random.Random) -> int:
    """Set the clock back by up to a year in the middle of a resumed run."""
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


def _exhaust_gpu_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def _exhaust_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte: the system raises its real error


def out_of_memory(lab: Lab, out: Path, draw: random.Random) -> int:
    """Run out of memory at some step: the error names the step and the last checkpoint."""
    with _at_step(draw.randint(0, 15), draw.choice((_exhaust_gpu_memory, _exhaust_memory))):
        return _stopped_by_error(lab, out, "out of memory at step")


def _stopped_by_error(lab: Lab, out: Path, text: str) -> bool:
    """Return whether an error of undrop stops the run; its message must contain the text."""
    message = None
    try:
        lab.resume(out)
    except UndropError as error:
        message = str(error)
    assert message is None or text in message, message
    return message is not None


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a separate file system with little more space than a run needs."""
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
    """Fill the disk before some write."""
    ballast, space = out.parent / "ballast", os.statvfs(out.parent)
    ballast.write_bytes(bytes(space.f_bavail * space.f_frsize - draw.randint(0, 20) * 4096))
    try:
        return _stopped_by_error(lab, out, "the disk is full")
    finally:
        ballast.unlink()


def read_only(lab: Lab, out: Path, draw: random.Random) -> int:
    """Make the disk of a run that stopped half-way read-only."""
    out_of_memory(lab, out, draw)
    gc.collect()  # tensors that map a deleted file would keep the disk busy
    _system("mount", "-o", "remount,ro", str(out.parent))
    try:
        return _stopped_by_error(lab, out, "read-only")
    finally:
        _system("mount", "-o", "remount,rw", str(out.parent))


STRIKES: dict[str, Strike] = {
    strike.__name__.replace("_", "-"): strike
    for strike in (kill, kill_in_write, terminate, pause, second_process, clock_back, out_of_memory)
}
DISK_STRIKES: dict[str, Strike] = {"disk-full": disk_full, "read-only": read_only}
"""Faults that need a small disk."""
