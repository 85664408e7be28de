"""Time the methods in turn, measure their peak memory in separate processes, and draw the ratios."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad

from undrop.lab.bench.methods import BASELINE, METHODS
from undrop.lab.bench.subjects import check_named, subject
from undrop.report.figures import bar_style, new_figure, save, styled

_LEAST = 0.02  # seconds to measure at once; shorter steps are repeated


@dataclass(frozen=True)
class MethodTime:
    """What one method costs."""

    name: str
    ratio: float  # the median over rounds of its time divided by dropout's in the same round
    low: float  # the 5 % quantile of the ratio
    high: float  # the 95 % quantile
    seconds: float  # the median time of a step
    peak_mb: float | None
    """The peak memory of a step in a separate process, beyond what Python and torch use.

    None if it was not measured, the process died, or the system does not report it.
    """


def bench(
    model: str,
    size: str,
    *,
    rounds: int = 10,
    names: Sequence[str] = tuple(METHODS),
    memory: bool = True,
    device: str = "cpu",
    tick: Callable[[str], None] = lambda name: None,
) -> list[MethodTime]:
    """Time every method in turn, round after round, in one process.

    Other work on the machine slows all methods of a round down alike, so their ratios hold. An untimed
    plain step precedes each timed step, so that no method pays for the caches and the memory that
    another one left behind. A step that takes less than 20 ms is timed several times in a row.

    Args:
        model: a name of ``SUBJECTS``.
        size: "small" or "paper".
        rounds: how often each method is timed, after one round to warm up.
        names: the methods; the baseline "dropout" is always one of them.
        memory: whether to measure peak memory, in one more process for each method.
        device: where to run; on a GPU a time includes waiting for the step to finish.
        tick: called with the method's name after each of its steps.

    Raises:
        UnknownNameError: for an unknown model, size or method, before a process is started.
    """
    check_named(model, size)
    names = list(dict.fromkeys([BASELINE, *names]))
    methods = {name: METHODS[name] for name in names}
    peaks: dict[str, float | None] = dict.fromkeys(names)
    for name in names if memory else ():  # first, while this process is small itself
        peaks[name] = _peak(model, size, name, device)
        tick(name)
    what = subject(model, size, device)
    steps = {name: _finished(method(what), device) for name, method in methods.items()}
    times = _times(steps, what.model, rounds, tick)
    order = [name for name in METHODS if name in names]
    return [_row(name, times[name], times[BASELINE], peaks[name]) for name in order]


def _times(
    steps: dict[str, Callable[[], None]],
    model: nn.Module,
    rounds: int,
    tick: Callable[[str], None],
) -> dict[str, list[float]]:
    """The seconds of each step in each round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    repeats = 1
    for turn in range(rounds + 1):
        for name, step in steps.items():
            plain = _timed(steps[BASELINE], model)
            seconds = _timed(step, model, repeats)
            if turn > 0:
                times[name].append(seconds)
            tick(name)
        if turn == 0:
            repeats = max(1, round(_LEAST / plain))
            gc.freeze()  # else garbage collection takes longer than the steps
    gc.unfreeze()
    return times


def _row(name: str, times: list[float], baseline: list[float], peak: float | None) -> MethodTime:
    ratios = [a / b for a, b in zip(times, baseline, strict=True)]
    low, high = (float(q) for q in np.quantile(ratios, (0.05, 0.95)))
    return MethodTime(name, statistics.median(ratios), low, high, statistics.median(times), peak)


def _timed(step: Callable[[], None], model: nn.Module, repeats: int = 1) -> float:
    """Return the mean time of ``repeats`` steps."""
    gc.collect()
    start = time.perf_counter()
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        step()
    return (time.perf_counter() - start) / repeats


def _finished(step: Callable[[], None], device: str) -> Callable[[], None]:
    """Return a step that waits until the device has finished."""
    if device == "cpu":
        return step

    def waiting() -> None:
        step()
        torch.get_device_module(device).synchronize()

    return waiting


def _peak(model: str, size: str, name: str, device: str) -> float | None:
    """The peak memory of two steps in a new process, in MB; None if it died or can't measure it."""
    if device != "cpu" and not hasattr(torch.get_device_module(device), "max_memory_allocated"):
        return None
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure_peak, args=(model, size, name, device, send))
    process.start()
    send.close()
    try:
        peak: float = receive.recv()
    except EOFError:
        return None
    finally:
        process.join()
    return peak


def _measure_peak(model: str, size: str, name: str, device: str, send: Any) -> None:
    with forward_ad.dual_level():  # load what torch loads on first use, before measuring
        forward_ad.make_dual(torch.randn(64, 64), torch.randn(64, 64)) @ torch.randn(64, 64)
    before = _resident(device)
    what = subject(model, size, device)
    step = METHODS[name](what)
    for _ in range(2):
        what.model.zero_grad(set_to_none=True)
        step()
    send.send(_resident(device) - before)


def _resident(device: str) -> float:
    """The peak memory of this process on the device so far, in MB."""
    if device != "cpu":
        return float(torch.get_device_module(device).max_memory_allocated()) / 1024.0**2
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include the parent's memory at the fork
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return float(line.split()[1]) / 1024.0
    import resource  # not on Windows

    unit = 1024.0**2 if sys.platform == "darwin" else 1024.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def draw(path: Path, title: str, rows: Sequence[MethodTime]) -> None:
    """Draw each method's time as a multiple of dropout's, with its 90 % interval."""
    with styled():
        figure = new_figure(7, 0.45 * len(rows) + 1.2)
        axes = figure.subplots()
        for y, row in enumerate(rows):
            error = [[row.ratio - row.low], [row.high - row.ratio]]
            axes.barh(y, row.ratio, xerr=error, **bar_style(1 if row.name == BASELINE else 2))
            axes.text(row.high, y, f"  {row.ratio:.2f}", va="center")
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.invert_yaxis()
        axes.axvline(1.0, color="0.2", linewidth=0.8, linestyle="--")
        axes.set_xlim(0, max(row.high for row in rows) * 1.12)
        axes.set(xlabel="time of a training step, × dropout", title=title)
    save(figure, path)
