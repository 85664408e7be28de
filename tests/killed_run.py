"""A training run in its own process that can kill itself at a chosen point while it writes."""

import os
import signal
from collections.abc import Callable
from typing import Any

import safetensors.torch

from undrop.lab import train
from undrop.lab.train import folder


def _die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at(count: int, original: Callable[..., Any], act: Callable[..., Any]) -> Callable[..., Any]:
    """Return the original function, with another one in place of the ``count``-th call."""
    calls = iter(range(1, 1 << 30))

    def counted(*args: Any, **kwargs: Any) -> Any:
        return act(*args, **kwargs) if next(calls) == count else original(*args, **kwargs)

    return counted


def arm(point: str, count: int) -> None:
    """Make the process die when the run reaches ``point`` for the ``count``-th time."""
    fsync, replace, save_file = os.fsync, os.replace, safetensors.torch.save_file

    def after_replace(*args: Any) -> None:
        replace(*args)
        _die()

    def half_the_tensors(tensors: Any, path: Any) -> None:
        save_file(tensors, path)
        os.truncate(path, os.path.getsize(path) // 2)
        _die()

    def half_a_line(self: Any, record: Any) -> None:
        with self.path.open("a") as file:
            file.write('{"kind": "st')
        _die()

    if point == "fsync":
        os.fsync = _at(count, fsync, _die)
    elif point == "before rename":
        os.replace = _at(count, replace, _die)
    elif point == "after rename":
        os.replace = _at(count, replace, after_replace)
    elif point == "in tensors":
        safetensors.torch.save_file = _at(count, save_file, half_the_tensors)
    elif point == "in metrics":
        folder.MetricsFile.append = _at(count, folder.MetricsFile.append, half_a_line)
    else:
        raise ValueError(point)


def work(config: dict[str, Any], out: str, point: str | None, count: int) -> None:
    """Train, or resume, until the run ends or the process dies."""
    if point is not None:
        arm(point, count)
    train.run(train.Config.parse(config), out=out, resume=True)
