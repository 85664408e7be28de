"""Execute a run and return its record; measure how long a step of each method takes."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import islice
from operator import truediv
from pathlib import Path
from typing import Any

import torch

from undrop.diagnosis.measure.r_drop import measure_r_drop
from undrop.errors import NonFiniteError
from undrop.files import read_json, write_json
from undrop.lab.corpora.batching import TrainingWindows
from undrop.lab.models import State, detach
from undrop.lab.reproduce import tables
from undrop.lab.reproduce.records import Curve, Record
from undrop.lab.reproduce.results import REFERENCE
from undrop.lab.reproduce.worklist import PlannedRun
from undrop.lab.train import Callback, Config, RunFolder, merge, run, train_interleaved
from undrop.lab.train.environment import find_device, machine, versions
from undrop.lab.train.runs import Run, open_run
from undrop.registry import Registry

PROBES: Registry[str, Callable[[Run], dict[str, float]]] = Registry("probe")
"""The probes by name: measurements on the trained model of a run."""

_TAYLOR_MASKS = 8
_TAYLOR_WINDOWS = 40


@PROBES.register("taylor")
def taylor(run: Run) -> dict[str, float]:
    """Compare R_drop with the quadratic term of its Taylor expansion, on the training split.

    The keys of the result are

    - ``dropped``: R_drop = E ℓ(F(x; 1, η)) - ℓ(F(x));
    - ``quadratic``: ½ E[uᵀHu], which is R_approx with Taylor's factor;
    - ``taylor_share``: quadratic / dropped.

    The first two are means over the first windows of the split, with the same masks.
    """
    device = next(run.model.parameters()).device
    measured = measure_r_drop(
        run.model,
        _first_windows(run, device),
        loss=run.model.loss(),
        masks=_TAYLOR_MASKS,
        generator=torch.Generator(device).manual_seed(run.config.train.seed),
    )
    return {
        "dropped": measured.parts.r_drop.value,
        "quadratic": measured.parts.half_quadratic.value,
        "taylor_share": measured.quadratic_share.value,
    }


def _first_windows(run: Run, device: torch.device) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield the model's arguments and the targets of the first windows of the training split.

    The hidden state of a window is the model's state after the window before it.
    """
    state: State | None = None
    data = run.config.data
    windows = TrainingWindows(run.corpus.train, data.batch_size, data.length)
    for window in islice(windows, _TAYLOR_WINDOWS):
        tokens, targets = window.inputs.to(device), window.targets.to(device)
        yield {"tokens": tokens, "state": state, "logits": False}, targets
        with torch.no_grad():
            state = detach(run.model(tokens, state, logits=False)[1])


_TIMES_FILE = "times.json"


def use_one_thread() -> None:
    """Make torch use one thread, so that a machine can do as many runs in parallel as it has cores."""
    torch.set_num_threads(1)


def execute_run(planned: PlannedRun, folder: str) -> Record:
    """Train, probe the trained model, and return the record.

    The caller removes the run's folder after it has saved the record. If a run diverges (a number is
    infinite or NaN), its record has the epochs before that.

    Raises:
        UndropError: if the run fails, or diverges in its first epoch. The next call with the same folder
            resumes the run.
    """
    use_one_thread()
    path = Path(folder)
    stopwatch = Stopwatch(path, on_cpu=find_device(planned.config.train.device).type == "cpu")
    ended, test_ppl = "diverged", None
    with contextlib.suppress(NonFiniteError):
        summary = run(planned.config, out=path, resume=True, callbacks=[stopwatch])
        ended, test_ppl = summary.ended, summary.test_ppl
    return _record(planned, path, stopwatch, ended, test_ppl)


class Stopwatch(Callback):
    """Measures the time of every epoch, and continues when a run resumes.

    On a CPU it measures CPU time, which other work on the machine hardly changes.
    """

    def __init__(self, folder: Path, *, on_cpu: bool) -> None:
        self._path = folder / _TIMES_FILE
        self._clock = time.process_time if on_cpu else time.perf_counter
        self.times: dict[str, list[float]] = read_json(self._path) if self._path.exists() else {}
        """By epoch: the seconds since the start, and those of the epoch's evaluation."""
        seconds_before = max((seconds for seconds, _ in self.times.values()), default=0.0)
        self._start = self._clock() - seconds_before
        self._last_step = self._clock()

    @property
    def seconds(self) -> float:
        """The seconds since the run started, without interruptions."""
        return self._clock() - self._start

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Remember the time, because the evaluation starts after the last step of an epoch."""
        self._last_step = self._clock()

    def record(self, record: Mapping[str, Any]) -> None:
        """Save the times of an epoch."""
        if record["kind"] == "epoch":
            evaluation = self._clock() - self._last_step
            self.times[str(record["epoch"])] = [round(self.seconds, 3), round(evaluation, 3)]
            write_json(self._path, self.times)


def _record(
    planned: PlannedRun, folder: Path, stopwatch: Stopwatch, ended: str, test_ppl: float | None
) -> Record:
    epochs = RunFolder(folder).metrics.epochs()
    if not epochs:
        raise NonFiniteError(f"{planned.title} diverged in its first epoch: lower optimizer.lr.")
    times = [stopwatch.times[str(line["epoch"])] for line in epochs]
    best = min(epochs, key=lambda line: line["valid_ppl"])
    trained = open_run(folder)
    probed = PROBES[planned.probe](trained) if planned.probe is not None else {}
    return Record(
        config=merge(planned.config.as_dict(), {"data": {"dir": None}}),
        probe=planned.probe,
        key=planned.key,
        seed=planned.config.train.seed,
        best_valid_ppl=best["valid_ppl"],
        best_epoch=best["epoch"],
        test_ppl=test_ppl,
        ended=ended,
        steps=epochs[-1]["step"],
        seconds=stopwatch.seconds,
        parameters=sum(p.numel() for p in trained.model.parameters()),
        curve=Curve(
            epoch=[line["epoch"] for line in epochs],
            step=[line["step"] for line in epochs],
            valid_ppl=[_six_digits(line["valid_ppl"]) for line in epochs],
            train_ppl=[line["train_ppl"] and _six_digits(line["train_ppl"]) for line in epochs],
            seconds=[seconds for seconds, _ in times],
            evaluation=[evaluation for _, evaluation in times],
        ),
        probed=probed,
        versions=versions(),
        machine=machine(find_device(planned.config.train.device)),
        commit=git_commit(),
        finished=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _six_digits(value: float) -> float:
    """Round a value of a curve, to keep the record small."""
    return float(f"{value:.6g}")


def git_commit() -> str | None:
    """Return the git commit of the code, with a + if files in src/ have changed; None without git."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", ":/src")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(*arguments: str) -> str:
    command, folder = ["git", *arguments], Path(__file__).parent
    quiet = subprocess.DEVNULL
    return subprocess.check_output(command, cwd=folder, stderr=quiet, text=True, timeout=10).strip()


def epochs_done(folder: Path) -> int:
    """Return the number of finished epochs of the run in a folder."""
    path = folder / _TIMES_FILE
    return len(read_json(path)) if path.exists() else 0


_STEPS_PER_EPOCH = 25  # if the setting has limit_tokens; else an epoch is the whole corpus
_TIMED_EPOCHS = 8
_WARMUP_EPOCHS = 2  # not timed, because engines run their checks in the first steps


def measure_step_costs(
    setting: tables.Setting,
    methods: Sequence[tables.Method],
    *,
    data_dir: str | None = None,
    epochs: int = _TIMED_EPOCHS,
) -> dict[str, float]:
    """Return the time of a step of each method, divided by plain dropout's.

    All methods train in one process, one epoch each in turn, so that other work on the machine slows
    all of them down alike. The cost is the median over epochs of the ratio of a method's epoch to
    dropout's epoch in the same turn. Evaluation is not timed.

    Args:
        setting: the model, the corpus and the schedule.
        methods: the methods to time.
        data_dir: the folder to read the corpus from instead of downloading it.
        epochs: the number of timed epochs; two more come before them.
    """
    data = setting.config["data"]
    tokens = _STEPS_PER_EPOCH * data["batch_size"] * data["length"]
    fraction = min(1.0, tokens / data["limit_tokens"]) if "limit_tokens" in data else 1.0
    overrides = {
        "data": {"dir": data_dir, "eval_tokens": 1_000, "fraction": fraction},
        "train": {"epochs": _WARMUP_EPOCHS + epochs, "test": "end", "train_perplexity": False},
    }
    configs = {
        method.name: Config.parse(merge(merge(setting.config, method.variants()[0]), overrides))
        for method in (tables.method(REFERENCE), *methods)
    }
    callbacks = {name: _EpochTimes() for name in configs}
    with tempfile.TemporaryDirectory() as folder:
        train_interleaved(configs, out=folder, callbacks=callbacks)
    times = {name: callback.seconds[_WARMUP_EPOCHS:] for name, callback in callbacks.items()}
    return {
        name: statistics.median(map(truediv, seconds, times[REFERENCE]))
        for name, seconds in times.items()
    }


class _EpochTimes(Callback):
    """Measures the seconds of each epoch, from the end of its first step to the end of its last step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._steps: list[float] = []

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Remember when the step ended."""
        self._steps.append(time.perf_counter())

    def record(self, record: Mapping[str, Any]) -> None:
        """Save the seconds of an epoch that has ended."""
        if record["kind"] == "epoch":
            self.seconds.append(self._steps[-1] - self._steps[0])
            self._steps.clear()
