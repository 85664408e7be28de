"""The cost of a training step with each method, as a ratio to dropout's step in the same process.

To time another model, add a function that returns a :class:`Subject`; to time another method, add one
that turns a subject into a step. ``lab/cli/_names.py`` has a line about each.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from undrop.errors import UnknownNameError
from undrop.lab.models import AWDLSTM, GPT, MLP
from undrop.losses import CrossEntropy, Loss
from undrop.objectives import Analytic, Dropout, NoRegularization, Objective
from undrop.registry import Registry
from undrop.report.figures import bar_style, new_figure, save, styled

SIZES = ("small", "paper")
_VOCABULARY = 10_000


@dataclass(frozen=True)
class Subject:
    """A model and a batch, for a plain loop and for an objective."""

    model: nn.Module
    plain: Callable[[], Tensor]  # returns the loss by PyTorch's own fastest path, with dropout
    inputs: Any  # for an objective
    targets: Tensor
    loss: Loss
    batch_dim: int = 0


SUBJECTS: Registry[str, Callable[[str], Subject]] = Registry("bench model")
"""What can be timed, by name; each function takes a size, which some ignore."""


def check_model_and_size(model: str, size: str) -> None:
    """Refuse an unknown model or size with an :class:`UnknownNameError`."""
    SUBJECTS[model]  # raises for an unknown name
    if size not in SIZES:
        raise UnknownNameError("bench size", size, SIZES)


def subject(model: str, size: str, device: str = "cpu") -> Subject:
    """Return the subject of that name and size on a device, with the same weights each time."""
    check_model_and_size(model, size)
    torch.manual_seed(0)
    with torch.device(device):
        return SUBJECTS[model](size)


def _integers(high: int, shape: tuple[int, ...]) -> Tensor:
    """Return random integers below ``high`` on the default device, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(high, shape, generator=generator, device="cpu").to(torch.empty(0).device)


def _language_model(
    model: Any, length: int, batch: int, *, words: int = _VOCABULARY, compiled: bool = False
) -> Subject:
    tokens = _integers(words, (length + 1, batch))
    x, y = tokens[:-1], tokens[1:]

    def plain() -> Tensor:
        logits, _ = model(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    loss = model.loss()
    if compiled:
        model = torch.compile(model)
    return Subject(model, plain, {"tokens": x, "logits": False}, y, loss, batch_dim=1)


def _classifier(model: nn.Module, x: Tensor, classes: int = 10) -> Subject:
    y = _integers(classes, (len(x),))
    return Subject(model, lambda: nn.functional.cross_entropy(model(x), y), x, y, CrossEntropy())


@SUBJECTS.register("awd-lstm", about="AWD-LSTM; the paper's size is its model for Penn Treebank")
def awd_lstm(size: str) -> Subject:
    """AWD-LSTM; size "paper" is the paper's model for Penn Treebank."""
    if size == "paper":
        return _language_model(AWDLSTM(_VOCABULARY), length=70, batch=20)
    model = AWDLSTM(_VOCABULARY, embedding_size=200, hidden_size=200, layers=2)
    return _language_model(model, length=35, batch=20)


@SUBJECTS.register(
    "transformer",
    about="A causal transformer; the paper's size has the widths of its Transformer-XL",
)
def transformer(size: str) -> Subject:
    """A causal transformer; the paper's size has the widths of its Transformer-XL."""
    if size == "paper":
        model = GPT(_VOCABULARY, size=410, layers=16, heads=10, context=150)
        return _language_model(model, length=150, batch=8)
    model = GPT(_VOCABULARY, size=256, layers=4, heads=4, context=128)
    return _language_model(model, length=128, batch=8)


@SUBJECTS.register("mlp", about="A classifier with two hidden layers")
def mlp(size: str) -> Subject:
    """A classifier with two hidden layers."""
    width, batch = (2048, 256) if size == "paper" else (512, 128)
    model = MLP((784, width, width, 10), dropout=0.5)
    return _classifier(model, torch.randn(batch, 784))


def small_mlp(size: str, inputs: int, width: int, batch: int) -> Subject:
    """A classifier so small that most of a step's time goes into calls, not into arithmetic."""
    return _classifier(MLP((inputs, width, width, 10), dropout=0.2), torch.randn(batch, inputs))


SUBJECTS.register("mlp-64", about="A classifier with two hidden layers of 64 units, batch 32")(
    partial(small_mlp, inputs=287, width=64, batch=32)
)
SUBJECTS.register("mlp-256", about="A classifier with two hidden layers of 256 units, batch 64")(
    partial(small_mlp, inputs=784, width=256, batch=64)
)


@SUBJECTS.register(
    "lstm-100", about="The language model of the small reproduction: 2 × 100 units, 1,000 words"
)
def lstm_100(size: str) -> Subject:
    """The language model of the small reproduction: 2×100, 1,000 words, batch 10, DropConnect."""
    model = AWDLSTM(1_000, embedding_size=100, hidden_size=100, layers=2)
    return _language_model(model, length=35, batch=10, words=1_000)


@SUBJECTS.register(
    "convnet", about="Two convolutions with max pooling, and dropout before the last layer"
)
def convnet(size: str) -> Subject:
    """Two convolutions with max pooling, dropout before the last layer, batch 64."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 49, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )
    return _classifier(model, torch.randn(64, 1, 28, 28))


def gpt(size: str, width: int, compiled: bool = False) -> Subject:
    """A causal transformer of 4 layers, 2,000 words, batch 8; ``compiled`` compiles the baseline too."""
    model = GPT(2_000, size=width, layers=4, heads=4, context=128)
    return _language_model(model, length=128, batch=8, words=2_000, compiled=compiled)


SUBJECTS.register("gpt-128", about="A causal transformer: 4 layers of 128 features, 2,000 words")(
    partial(gpt, width=128)
)
SUBJECTS.register("gpt-256", about="A causal transformer: 4 layers of 256 features, 2,000 words")(
    partial(gpt, width=256)
)
SUBJECTS.register("gpt-128-compiled", about="gpt-128 under torch.compile")(
    partial(gpt, width=128, compiled=True)
)
SUBJECTS.register("gpt-256-compiled", about="gpt-256 under torch.compile")(
    partial(gpt, width=256, compiled=True)
)


Step: TypeAlias = Callable[[], None]

METHODS: Registry[str, Callable[[Subject], Step]] = Registry("bench method")
"""The methods by name, in the order in which they are shown."""

BASELINE = "dropout"
"""The method that all others are compared with."""


def _step(subject: Subject, objective: Objective) -> Step:
    return lambda: objective(subject.model, subject.inputs, subject.targets).backward()


@METHODS.register("none", about="The loss alone")
def none(subject: Subject) -> Step:
    """The loss alone."""
    return _step(subject, NoRegularization(loss=subject.loss))


@METHODS.register(
    "dropout", about="The baseline: a step of plain PyTorch with dropout, without undrop"
)
def dropout(subject: Subject) -> Step:
    """The baseline: a hand-written step on PyTorch's own fastest path, without undrop."""
    return lambda: subject.plain().backward()


@METHODS.register("drop8", about="Dropout averaged over 8 masks")
def drop8(subject: Subject) -> Step:
    """Drop_8, the mean over eight masks."""
    return _step(subject, Dropout(k=8, loss=subject.loss))


def analytic(subject: Subject, **options: Any) -> Step:
    """Both analytic parts."""
    return _step(subject, Analytic(loss=subject.loss, batch_dim=subject.batch_dim, **options))


METHODS.register("reverse-explicit", about="The explicit part, by the reverse engine")(
    partial(analytic, engine="reverse", implicit=False)
)
METHODS.register("reverse-both", about="Both parts, by the reverse engine")(
    partial(analytic, engine="reverse")
)
METHODS.register("tangent-both", about="Both parts, by the tangent engine")(
    partial(analytic, engine="tangent")
)
METHODS.register("antithetic-both", about="Both parts, by the antithetic engine")(
    partial(analytic, engine="antithetic")
)
METHODS.register(
    "antithetic-both-quarter", about="Both parts, with noise on a quarter of the batch"
)(partial(analytic, engine="antithetic", fraction=0.25))
METHODS.register(
    "antithetic-both-eighth", about="Both parts, with noise on an eighth of the batch"
)(partial(analytic, engine="antithetic", fraction=0.125))


_LEAST = 0.02  # seconds of one measurement; shorter steps are repeated


@dataclass(frozen=True)
class MethodTime:
    """The time and memory of one method."""

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
        rounds: how many times each method is timed, after one round to warm up.
        names: the methods; the baseline "dropout" is always one of them.
        memory: whether to measure peak memory, in one more process for each method.
        device: where to run; on a GPU a time includes waiting for the step to finish.
        tick: called with the method's name after each of its steps.

    Raises:
        UnknownNameError: for an unknown model, size or method, before a process is started.
    """
    check_model_and_size(model, size)
    names = list(dict.fromkeys([BASELINE, *names]))
    methods = {name: METHODS[name] for name in names}
    peaks: dict[str, float | None] = dict.fromkeys(names)
    for name in names if memory else ():  # first, while this process is still small
        peaks[name] = _peak(model, size, name, device)
        tick(name)
    what = subject(model, size, device)
    steps = {name: _synchronized(method(what), device) for name, method in methods.items()}
    times = _times(steps, what.model, rounds, tick)
    order = [name for name in METHODS if name in names]
    return [_row(name, times[name], times[BASELINE], peaks[name]) for name in order]


def _times(
    steps: dict[str, Callable[[], None]], model: nn.Module, rounds: int, tick: Callable[[str], None]
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
            gc.freeze()  # otherwise collecting garbage takes longer than the steps
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


def _synchronized(step: Callable[[], None], device: str) -> Callable[[], None]:
    """Return a step that waits until the device has finished."""
    if device == "cpu":
        return step

    def waiting() -> None:
        step()
        torch.get_device_module(device).synchronize()

    return waiting


def _peak(model: str, size: str, name: str, device: str) -> float | None:
    """The peak memory of two steps in a new process, in MB; None if the process can't measure it."""
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
