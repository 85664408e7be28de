"""The cost of a training step with each method, as a multiple of dropout's step in the same process.

To time another model, register a function that returns a :class:`Subject` in :data:`SUBJECTS`. To time
another method, register a function that turns a subject into a step in :data:`METHODS`.
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
    """A model and a batch to time."""

    model: nn.Module
    plain_loss: Callable[[], Tensor]  # the loss with dropout, by PyTorch's own fastest path
    inputs: Any  # what an objective passes to the model
    targets: Tensor
    loss: Loss
    batch_dim: int = 0


SUBJECTS: Registry[str, Callable[[str], Subject]] = Registry("bench model")
"""The models that can be timed. Each function takes a size; a model of a single size ignores it."""


def make_subject(model: str, size: str, device: str = "cpu") -> Subject:
    """Return the subject of this name and size on a device, with the same weights each time."""
    torch.manual_seed(0)
    with torch.device(device):
        return SUBJECTS[model](size)


def _random_integers(high: int, shape: tuple[int, ...]) -> Tensor:
    """Return integers below ``high`` on the default device; they are the same on every device."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(high, shape, generator=generator, device="cpu").to(torch.empty(0).device)


def _language_model(
    model: Any, length: int, batch: int, *, words: int = _VOCABULARY, compiled: bool = False
) -> Subject:
    tokens = _random_integers(words, (length + 1, batch))
    x, y = tokens[:-1], tokens[1:]

    def plain_loss() -> Tensor:
        logits, _ = model(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    loss = model.loss()
    if compiled:
        model = torch.compile(model)
    return Subject(model, plain_loss, {"tokens": x, "logits": False}, y, loss, batch_dim=1)


def _classifier(model: nn.Module, x: Tensor, classes: int = 10) -> Subject:
    y = _random_integers(classes, (len(x),))
    return Subject(model, lambda: nn.functional.cross_entropy(model(x), y), x, y, CrossEntropy())


@SUBJECTS.register("awd-lstm", about="AWD-LSTM; the paper's size is its model for Penn Treebank")
def _awd_lstm(size: str) -> Subject:
    if size == "paper":
        return _language_model(AWDLSTM(_VOCABULARY), length=70, batch=20)
    model = AWDLSTM(_VOCABULARY, embedding_size=200, hidden_size=200, layers=2)
    return _language_model(model, length=35, batch=20)


@SUBJECTS.register(
    "transformer",
    about="A causal transformer; the paper's size has the widths of its Transformer-XL",
)
def _transformer(size: str) -> Subject:
    if size == "paper":
        model = GPT(_VOCABULARY, size=410, layers=16, heads=10, context=150)
        return _language_model(model, length=150, batch=8)
    model = GPT(_VOCABULARY, size=256, layers=4, heads=4, context=128)
    return _language_model(model, length=128, batch=8)


@SUBJECTS.register("mlp", about="A classifier with two hidden layers")
def _mlp(size: str) -> Subject:
    width, batch = (2048, 256) if size == "paper" else (512, 128)
    model = MLP((784, width, width, 10), dropout=0.5)
    return _classifier(model, torch.randn(batch, 784))


def _small_mlp(size: str, inputs: int, width: int, batch: int) -> Subject:
    """A classifier so small that calls take most of a step's time, and arithmetic takes little."""
    return _classifier(MLP((inputs, width, width, 10), dropout=0.2), torch.randn(batch, inputs))


SUBJECTS.register("mlp-64", about="A classifier with two hidden layers of 64 units, batch 32")(
    partial(_small_mlp, inputs=287, width=64, batch=32)
)
SUBJECTS.register("mlp-256", about="A classifier with two hidden layers of 256 units, batch 64")(
    partial(_small_mlp, inputs=784, width=256, batch=64)
)


@SUBJECTS.register(
    "lstm-100", about="The language model of the small reproduction: 2 × 100 units, 1,000 words"
)
def _lstm_100(size: str) -> Subject:
    model = AWDLSTM(1_000, embedding_size=100, hidden_size=100, layers=2)
    return _language_model(model, length=35, batch=10, words=1_000)


@SUBJECTS.register(
    "convnet", about="Two convolutions with max pooling, and dropout before the last layer"
)
def _convnet(size: str) -> Subject:
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 49, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )
    return _classifier(model, torch.randn(64, 1, 28, 28))


def _gpt(size: str, width: int, compiled: bool = False) -> Subject:
    """A causal transformer; with ``compiled``, the baseline is compiled too."""
    model = GPT(2_000, size=width, layers=4, heads=4, context=128)
    return _language_model(model, length=128, batch=8, words=2_000, compiled=compiled)


SUBJECTS.register("gpt-128", about="A causal transformer: 4 layers of 128 features, 2,000 words")(
    partial(_gpt, width=128)
)
SUBJECTS.register("gpt-256", about="A causal transformer: 4 layers of 256 features, 2,000 words")(
    partial(_gpt, width=256)
)
SUBJECTS.register("gpt-128-compiled", about="gpt-128 under torch.compile")(
    partial(_gpt, width=128, compiled=True)
)
SUBJECTS.register("gpt-256-compiled", about="gpt-256 under torch.compile")(
    partial(_gpt, width=256, compiled=True)
)


Step: TypeAlias = Callable[[], None]

METHODS: Registry[str, Callable[[Subject], Step]] = Registry("bench method")
"""The methods that can be timed, in the order of the table."""

BASELINE = "dropout"
"""The method that all others are compared with."""


def _objective_step(subject: Subject, objective: Objective) -> Step:
    return lambda: objective(subject.model, subject.inputs, subject.targets).backward()


@METHODS.register("none", about="The loss alone")
def _none(subject: Subject) -> Step:
    return _objective_step(subject, NoRegularization(loss=subject.loss))


@METHODS.register(
    "dropout", about="The baseline: a step of plain PyTorch with dropout, without undrop"
)
def _dropout(subject: Subject) -> Step:
    return lambda: subject.plain_loss().backward()


@METHODS.register("drop8", about="Dropout averaged over 8 masks")
def _drop8(subject: Subject) -> Step:
    return _objective_step(subject, Dropout(k=8, loss=subject.loss))


def _analytic(subject: Subject, **options: Any) -> Step:
    objective = Analytic(loss=subject.loss, batch_dim=subject.batch_dim, **options)
    return _objective_step(subject, objective)


METHODS.register("reverse-explicit", about="The explicit part, by the reverse engine")(
    partial(_analytic, engine="reverse", implicit=False)
)
METHODS.register("reverse-both", about="Both parts, by the reverse engine")(
    partial(_analytic, engine="reverse")
)
METHODS.register("tangent-both", about="Both parts, by the tangent engine")(
    partial(_analytic, engine="tangent")
)
METHODS.register("antithetic-both", about="Both parts, by the antithetic engine")(
    partial(_analytic, engine="antithetic")
)
METHODS.register(
    "antithetic-both-quarter", about="Both parts, with noise on a quarter of the batch"
)(partial(_analytic, engine="antithetic", fraction=0.25))
METHODS.register(
    "antithetic-both-eighth", about="Both parts, with noise on an eighth of the batch"
)(partial(_analytic, engine="antithetic", fraction=0.125))


_MIN_SECONDS = 0.02  # of a measurement; shorter steps are repeated for this long


@dataclass(frozen=True)
class MethodTime:
    """The time and memory of one method."""

    name: str
    ratio: float  # its time divided by dropout's in the same round; the median over rounds
    low: float  # the 5 % quantile of the ratio
    high: float  # the 95 % quantile of the ratio
    seconds: float  # the median time of a step
    peak_mb: float | None
    """The peak memory of a step in a process of its own, in MB, without what Python and torch use.

    None if it was not measured, the process died, or the device does not report it.
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

    Other work on the machine slows down all methods of a round alike, so it does not change their
    ratios. A step of the baseline precedes each timed step, so that no method pays for the caches and
    the memory that another method left behind. If a step of the
    baseline takes less than 20 ms, every step is timed several times in a row.

    Args:
        model: a name of ``SUBJECTS``.
        size: "small" or "paper".
        rounds: how many times each method is timed, after one round to warm up.
        names: the methods; the baseline "dropout" is always added.
        memory: whether to measure peak memory, in one more process for each method.
        device: where to run; on a GPU, a step's time lasts until the GPU has finished.
        tick: called with a method's name after each of its measurements.

    Raises:
        UnknownNameError: for an unknown model, size or method, before a process is started.
    """
    SUBJECTS[model]  # raises for an unknown name
    if size not in SIZES:
        raise UnknownNameError("bench size", size, SIZES)
    names = list(dict.fromkeys([BASELINE, *names]))
    methods = {name: METHODS[name] for name in names}
    peaks: dict[str, float | None] = dict.fromkeys(names)
    for name in names if memory else ():  # first, before this process uses much memory
        peaks[name] = _peak_memory(model, size, name, device)
        tick(name)
    subject = make_subject(model, size, device)
    steps = {name: _synchronized(method(subject), device) for name, method in methods.items()}
    times = _time_rounds(steps, subject.model, rounds, tick)
    order = [name for name in METHODS if name in names]
    return [_result(name, times[name], times[BASELINE], peaks[name]) for name in order]


def _time_rounds(
    steps: dict[str, Step], model: nn.Module, rounds: int, tick: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return the seconds of each method's step in each round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    repeats = 1
    for index in range(rounds + 1):
        for name, step in steps.items():
            baseline = _time_step(steps[BASELINE], model)
            seconds = _time_step(step, model, repeats)
            if index > 0:  # the first round only warms up
                times[name].append(seconds)
            tick(name)
        if index == 0:
            repeats = max(1, round(_MIN_SECONDS / baseline))
            gc.freeze()  # otherwise collecting garbage takes longer than the steps
    gc.unfreeze()
    return times


def _result(name: str, times: list[float], baseline: list[float], peak: float | None) -> MethodTime:
    ratios = [a / b for a, b in zip(times, baseline, strict=True)]
    low, high = (float(q) for q in np.quantile(ratios, (0.05, 0.95)))
    return MethodTime(name, statistics.median(ratios), low, high, statistics.median(times), peak)


def _time_step(step: Step, model: nn.Module, repeats: int = 1) -> float:
    """Return the mean time of ``repeats`` steps, in seconds."""
    gc.collect()
    start = time.perf_counter()
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        step()
    return (time.perf_counter() - start) / repeats


def _synchronized(step: Step, device: str) -> Step:
    """Return a step that waits until the device has finished."""
    if device == "cpu":
        return step

    def synchronized_step() -> None:
        step()
        torch.get_device_module(device).synchronize()

    return synchronized_step


def _peak_memory(model: str, size: str, name: str, device: str) -> float | None:
    """Return :attr:`MethodTime.peak_mb`, measured over two steps in a new process."""
    if device != "cpu" and not hasattr(torch.get_device_module(device), "max_memory_allocated"):
        return None
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send_peak_memory, args=(model, size, name, device, send))
    process.start()
    send.close()
    try:
        peak: float = receive.recv()
    except EOFError:
        return None
    finally:
        process.join()
    return peak


def _send_peak_memory(model: str, size: str, name: str, device: str, send: Any) -> None:
    with forward_ad.dual_level():  # torch loads parts of itself at their first use: not counted
        forward_ad.make_dual(torch.randn(64, 64), torch.randn(64, 64)) @ torch.randn(64, 64)
    before = _process_peak(device)
    subject = make_subject(model, size, device)
    step = METHODS[name](subject)
    for _ in range(2):
        subject.model.zero_grad(set_to_none=True)
        step()
    send.send(_process_peak(device) - before)


def _process_peak(device: str) -> float:
    """Return the peak memory of this process on the device so far, in MB."""
    if device != "cpu":
        return float(torch.get_device_module(device).max_memory_allocated()) / 1024.0**2
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would include the parent's memory at the fork
        line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM"))
        return float(line.split()[1]) / 1024.0
    import resource  # not on Windows

    unit = 1024.0**2 if sys.platform == "darwin" else 1024.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def draw_ratios(path: Path, title: str, rows: Sequence[MethodTime]) -> None:
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
