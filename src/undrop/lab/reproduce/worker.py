"""Execute one run (train, probe the trained model, return the record), or time the steps of methods."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import islice
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
"""The probes by name; a setting names at most one."""

_MASKS = 8
_WINDOWS = 40


@PROBES.register("taylor")
def taylor(run: Run) -> dict[str, float]:
    """Compare R_drop with the quadratic term of its Taylor expansion, on the training split.

    - ``dropped``: R_drop = E ℓ(F(x; 1, η)) - ℓ(F(x)), over masks;
    - ``quadratic``: ½ E[uᵀHu], R_approx with Taylor's factor;
    - ``taylor_share``: quadratic / dropped.

    Both are means over the first windows of the split, with the same masks.
    """
    device = next(run.model.parameters()).device
    found = measure_r_drop(
        run.model,
        _windows(run, device),
        loss=run.model.loss(),
        masks=_MASKS,
        generator=torch.Generator(device).manual_seed(run.config.train.seed),
    )
    return {
        "dropped": found.parts.r_drop.value,
        "quadratic": found.parts.half_quadratic.value,
        "taylor_share": found.quadratic_share.value,
    }


def _windows(run: Run, device: torch.device) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """The first windows, each with the state after the window before it, in eval mode."""
    state: State | None = None
    data = run.config.data
    for window in islice(TrainingWindows(run.corpus.train, data.batch_size, data.length), _WINDOWS):
        tokens, targets = window.inputs.to(device), window.targets.to(device)
        yield {"tokens": tokens, "state": state, "logits": False}, targets
        with torch.no_grad():
            state = detach(run.model(tokens, state, logits=False)[1])


_TIMES = "times.json"


def use_one_thread() -> None:
    """Make torch use one thread, so that a machine can do as many runs in parallel as it has cores."""
    torch.set_num_threads(1)


def execute(job: PlannedRun, scratch: str) -> Record:
    """Train, measure, and return the record.

    The folder ``scratch`` is kept, because the record is not on the disk yet. A run that diverges (a
    number is infinite or NaN) is a result too: its record holds the epochs before that.

    Raises:
        UndropError: if something went wrong; ``scratch`` then holds the work done so far.
    """
    use_one_thread()
    folder = Path(scratch)
    stopwatch = Stopwatch(folder, on_cpu=find_device(job.config.train.device).type == "cpu")
    ended, test = "diverged", None
    with contextlib.suppress(NonFiniteError):
        summary = run(job.config, out=folder, resume=True, callbacks=[stopwatch])
        ended, test = summary.ended, summary.test_ppl
    return _record(job, folder, stopwatch, ended, test)


class Stopwatch(Callback):
    """Measures the time of every epoch, even of a run that was resumed.

    On a CPU it counts CPU time, which other work on the machine does not change.
    """

    def __init__(self, folder: Path, *, on_cpu: bool) -> None:
        self._path = folder / _TIMES
        self._clock = time.process_time if on_cpu else time.perf_counter
        self.times: dict[str, list[float]] = read_json(self._path) if self._path.exists() else {}
        earlier = max((seconds for seconds, _ in self.times.values()), default=0.0)
        self._start = self._clock() - earlier
        self._trained = self._clock()

    @property
    def seconds(self) -> float:
        """Seconds since the run started."""
        return self._clock() - self._start

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Remember the time; the evaluation comes after the last step of an epoch."""
        self._trained = self._clock()

    def record(self, record: Mapping[str, Any]) -> None:
        """Write the times of an epoch to the disk."""
        if record["kind"] == "epoch":
            evaluation = self._clock() - self._trained
            self.times[str(record["epoch"])] = [round(self.seconds, 3), round(evaluation, 3)]
            write_json(self._path, self.times)


def _record(
    job: PlannedRun, folder: Path, stopwatch: Stopwatch, ended: str, test: float | None
) -> Record:
    epochs = RunFolder(folder).metrics.epochs()
    if not epochs:
        raise NonFiniteError(f"{job.title} diverged in its first epoch: lower optimizer.lr.")
    times = [stopwatch.times[str(line["epoch"])] for line in epochs]
    best = min(epochs, key=lambda line: line["valid_ppl"])
    trained = open_run(folder)
    probed = PROBES[job.probe](trained) if job.probe is not None else {}
    return Record(
        config={**job.config.as_dict(), "data": {**job.config.data.model_dump(), "dir": None}},
        probe=job.probe,
        key=job.key,
        seed=job.config.train.seed,
        best_valid_ppl=best["valid_ppl"],
        best_epoch=best["epoch"],
        test_ppl=test,
        ended=ended,
        steps=epochs[-1]["step"],
        seconds=stopwatch.seconds,
        parameters=sum(p.numel() for p in trained.model.parameters()),
        curve=Curve(
            epoch=[line["epoch"] for line in epochs],
            step=[line["step"] for line in epochs],
            valid_ppl=[_short(line["valid_ppl"]) for line in epochs],
            train_ppl=[line["train_ppl"] and _short(line["train_ppl"]) for line in epochs],
            seconds=[seconds for seconds, _ in times],
            evaluation=[evaluation for _, evaluation in times],
        ),
        probed=probed,
        versions=versions(),
        machine=machine(find_device(job.config.train.device)),
        commit=git_commit(),
        finished=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _short(value: float) -> float:
    """Round to six digits, which are enough for a curve and keep the record small."""
    return float(f"{value:.6g}")


def git_commit() -> str | None:
    """Return the git commit of the code, with a + if the code has changes; None without git."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", ":/src")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def epochs_done(scratch: Path) -> int:
    """Return the number of finished epochs of a run, from its folder."""
    path = scratch / _TIMES
    return len(read_json(path)) if path.exists() else 0


_STEPS = 25  # the length of an epoch, if the setting limits its text
_EPOCHS = 8
_WARMUP = 2  # epochs that are not counted: engines run their checks in the first steps


def measure_step_costs(
    setting: tables.Setting,
    methods: Sequence[tables.Method],
    *,
    data_dir: str | None = None,
    epochs: int = _EPOCHS,
) -> dict[str, float]:
    """Return each method's time for a step, divided by plain dropout's.

    All methods train in one process, one epoch of each in turn, so that other work on the machine slows
    all of them down alike. The result is the median over epochs of the ratio in the same turn.
    Evaluation is not counted.

    Args:
        setting: what to train.
        methods: the methods to time.
        data_dir: the folder to read the corpus from instead of downloading it.
        epochs: how many epochs to time, after two to warm up.
    """
    timed = {m.name: m for m in (tables.method(REFERENCE), *methods)}
    data = setting.settings["data"]
    text = _STEPS * data["batch_size"] * data["length"]
    share = min(1.0, text / data["limit_tokens"]) if "limit_tokens" in data else 1.0
    overlay = {
        "data": {"dir": data_dir, "eval_tokens": 1_000, "fraction": share},
        "train": {"epochs": epochs + _WARMUP, "test": "end", "train_perplexity": False},
    }
    configs = {
        name: Config.parse(merge(merge(setting.settings, m.variants()[0]), overlay))
        for name, m in timed.items()
    }
    watches = {name: _EpochTimes() for name in configs}
    with tempfile.TemporaryDirectory() as folder:
        train_interleaved(configs, out=folder, callbacks=watches)
    plain = watches[REFERENCE].seconds[_WARMUP:]
    return {
        name: statistics.median(
            own / other for own, other in zip(watch.seconds[_WARMUP:], plain, strict=True)
        )
        for name, watch in watches.items()
    }


class _EpochTimes(Callback):
    """The seconds from the first step of each epoch to its last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._first: float | None = None
        self._last = 0.0

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Remember the time of the first and the last step."""
        self._last = time.perf_counter()
        self._first = self._last if self._first is None else self._first

    def record(self, record: Mapping[str, Any]) -> None:
        """End an epoch."""
        if record["kind"] == "epoch":
            assert self._first is not None
            self.seconds.append(self._last - self._first)
            self._first = None
