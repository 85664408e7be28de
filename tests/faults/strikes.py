"""The faults: each strikes a run once and tells whether it hit.

What must hold at the strike itself (a refusal, a sentence) is asserted here; that nothing was lost is
seen afterwards, when the run is let to its end and its bits are compared.
"""

import contextlib
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
from undrop.train.parallel import Gradient

POINTS = ("fsync", "before rename", "after rename", "in tensors", "in metrics")


def kill(lab: Lab, out: Path, draw: random.Random) -> bool:
    """SIGKILL at any moment."""
    process = lab.start(out)
    process.join(draw.uniform(0.0, lab.seconds))
    process.kill()
    process.join()
    return bool(process.exitcode == -signal.SIGKILL)


def kill_in_write(lab: Lab, out: Path, draw: random.Random) -> bool:
    """SIGKILL inside a write: at an fsync, around a rename, in half a file, in half a line."""
    process = lab.start(out, draw.choice(POINTS), draw.randint(1, 6))
    process.join()
    return bool(process.exitcode == -signal.SIGKILL)


def terminate(lab: Lab, out: Path, draw: random.Random) -> bool:
    """SIGTERM, upon which the state is saved."""
    process = lab.start(out)
    if lab.wait_for_lock(out, process):
        process.join(draw.uniform(0.0, lab.seconds))
    process.terminate()
    process.join()
    assert process.exitcode in (0, -signal.SIGTERM)
    return not lab.ended(out)


def pause(lab: Lab, out: Path, draw: random.Random) -> bool:
    """SIGSTOP, and SIGCONT a little later; the folder stays taken in between."""
    process = lab.start(out)
    if not lab.wait_for_lock(out, process):
        return False
    process.join(draw.uniform(0.0, 0.5 * lab.seconds))
    hit = process.is_alive()
    if hit:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.05)
        os.kill(process.pid, signal.SIGCONT)
    process.join()
    assert process.exitcode == 0
    return hit


def second_process(lab: Lab, out: Path, draw: random.Random) -> bool:
    """Another process on the same folder: refused, with the pid of the first."""
    process = lab.start(out)
    refused = False
    if lab.wait_for_lock(out, process):
        os.kill(process.pid, signal.SIGSTOP)  # lest it end while we try
        try:
            lab.resume(out)
        except RunError as error:
            refused = f"is in use by process {process.pid}:" in str(error)
        os.kill(process.pid, signal.SIGCONT)
        assert refused
    process.join()
    return refused


@contextlib.contextmanager
def _at_step(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Within the block, ``act`` comes before the gradient of that step, counted from 0."""
    steps, gradient = itertools.count(), Gradient.__call__

    def struck(*args: object) -> object:
        if next(steps) == number:
            act()
        return gradient(*args)

    with mock.patch.object(Gradient, "__call__", struck):
        yield


def clock_back(lab: Lab, out: Path, draw: random.Random) -> bool:
    """The clock goes back by up to a year in the middle of a run that a kill had begun."""
    now, ahead = time.time, draw.uniform(0.0, 3e7)
    kill(lab, out, draw)
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
        _at_step(draw.randint(0, 40), go_back),
    ):
        lab.resume(out)
    return ahead == 0.0


def _exhaust_graphics() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def _exhaust_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte: what the system itself says of it


def out_of_memory(lab: Lab, out: Path, draw: random.Random) -> bool:
    """The batch does not fit, at some step: named, with what is saved."""
    with _at_step(draw.randint(0, 40), draw.choice((_exhaust_graphics, _exhaust_memory))):
        return _refused(lab, out, "out of memory at step")


def _refused(lab: Lab, out: Path, word: str) -> bool:
    """Whether the run is stopped by an error of ours, which must say the word."""
    said = None
    try:
        lab.resume(out)
    except UndropError as error:
        said = str(error)
    assert said is None or word in said, said
    return said is not None


@contextlib.contextmanager
def _mounted(out: Path, size: str) -> Iterator[None]:
    """A file system of its own under ``out``; what the run left there is kept afterwards."""
    out.mkdir(parents=True, exist_ok=True)
    kept = out.with_name(out.name + ".kept")
    if kept.exists():
        raise FileExistsError(kept)
    _system("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(out))
    try:
        yield
        _system("cp", "-a", str(out), str(kept))
    finally:
        _system("umount", str(out))
    out.rmdir()
    kept.rename(out)


def _system(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPossibleError(done.stderr.strip())


def disk_full(lab: Lab, out: Path, draw: random.Random) -> bool:
    """No room left, at some write."""
    if out.exists():
        return False  # a file system is mounted on a folder that is still empty
    with _mounted(out, "1m"):
        ballast = out / "ballast"
        space = os.statvfs(out)
        ballast.write_bytes(bytes(space.f_bavail * space.f_frsize - draw.randint(1, 25) * 4096))
        hit = _refused(lab, out, "the disk is full")
        ballast.unlink()
    return hit


def read_only(lab: Lab, out: Path, draw: random.Random) -> bool:
    """The folder of a run that stopped half-way can't be written to any more."""
    if out.exists():
        return False
    with _mounted(out, "4m"):
        out_of_memory(lab, out, draw)
        _system("mount", "-o", "remount,ro", str(out))
        hit = _refused(lab, out, "read-only")
        _system("mount", "-o", "remount,rw", str(out))
    return hit


STRIKES: dict[str, Strike] = {
    strike.__name__.replace("_", "-"): strike
    for strike in (
        *(kill, kill_in_write, terminate, pause, second_process),
        *(clock_back, out_of_memory, disk_full, read_only),
    )
}
