"""The scoreboard's runs: for every method a search on seed 0, then runs on the reported seeds."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undrop.engines.antithetic import Antithetic
from undrop.files import naming_disk_errors, read_json, write_json
from undrop.lab.reproduce.worker import git_commit, use_one_thread
from undrop.lab.scoreboard.data import Data, batches
from undrop.lab.scoreboard.tasks import TASKS, Task
from undrop.lab.train.environment import machine, versions
from undrop.losses import Loss
from undrop.objectives import Analytic, Dropout
from undrop.tuning import Tuner

_EVALUATIONS = 8  # in a run, on the validation and the test split

TrainingStep = Callable[[nn.Module, Tensor, Tensor], Any]
"""A function of (model, inputs, targets) that returns a loss or a step. Both have ``backward()``."""


@dataclass(frozen=True)
class Spec:
    """What identifies a run. The settings that all methods share are those of the task."""

    task: str  # a name in TASKS
    kind: str  # "none", "dropout", "analytic", "tuner", or "analytic:ε₀" for another ε₀
    p: float  # the drop probability of the model's dropouts
    decay: float  # the weight decay
    seed: int  # of the data, the weights and the noise
    epochs: int

    @property
    def key(self) -> str:
        """The hash that names the run's record."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_spec(spec: Spec, root: str) -> dict[str, Any]:
    """Train and evaluate the model of a spec, and return the record.

    The record has the validation and test loss of the evaluation with the lowest validation loss.
    """
    use_one_thread()
    task = TASKS[spec.task]
    data = task.data(Path(root), spec.seed)
    torch.manual_seed(1_000 + spec.seed)
    model = task.model(Path(root), 0.0 if spec.kind == "none" else spec.p).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=task.lr, weight_decay=spec.decay)
    curve, seconds, steps = train(spec, model, optimizer, _training_step(spec, task, data), data)
    best = min(curve, default=[math.inf, math.inf])
    return {
        "spec": asdict(spec),
        "validation": best[0],
        "test": best[1],
        "steps": steps,
        "seconds": round(seconds, 3),
        "versions": versions(),
        "machine": machine(torch.device("cpu")),
        "commit": git_commit(),
    }


def train(
    spec: Spec, model: nn.Module, optimizer: torch.optim.Optimizer, step: TrainingStep, data: Data
) -> tuple[list[list[float]], float, int]:
    """Train a model, and evaluate it eight times. A validation loss that is not finite ends the run.

    Returns:
        the [validation loss, test loss] of every evaluation, the CPU seconds without evaluation, and the
        number of steps.
    """
    task = TASKS[spec.task]
    generator = torch.Generator().manual_seed(spec.seed)
    per_epoch = 1 if data.full_batch else data.train[0].shape[data.batch_dim] // task.batch
    total_steps = per_epoch * spec.epochs
    steps, seconds, curve = 0, 0.0, []
    evaluated_epochs = {
        math.ceil(spec.epochs * k / _EVALUATIONS) for k in range(1, _EVALUATIONS + 1)
    }
    for epoch in range(1, spec.epochs + 1):
        start = time.process_time()
        for inputs, targets in batches(data, "train", task.batch, generator):
            cosine = 0.5 * (1.0 + math.cos(math.pi * steps / total_steps))
            optimizer.param_groups[0]["lr"] = task.lr * cosine
            optimizer.zero_grad()
            step(model, inputs, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            steps += 1
        seconds += time.process_time() - start
        if epoch in evaluated_epochs:
            losses = [_evaluate(model, task.loss(), data, part) for part in ("validation", "test")]
            if not math.isfinite(losses[0]):
                break
            curve.append(losses)
    return curve, seconds, steps


def _evaluate(model: nn.Module, loss: Loss, data: Data, part: str) -> float:
    """Return the mean loss on a part of the data, in eval mode."""
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for inputs, targets in batches(data, part, 200, None):
            targets_used = float((targets != -100).sum())
            total += float(loss.value(_logits(model(inputs)), targets)) * targets_used
            count += targets_used
    model.train()
    return total / count


def _logits(output: Any) -> Tensor:
    logits: Tensor = output[0] if isinstance(output, tuple) else output
    return logits


def _training_step(spec: Spec, task: Task, data: Data) -> TrainingStep:
    loss = task.loss()
    if spec.kind in ("none", "dropout"):  # plain PyTorch, the baseline
        return lambda model, inputs, targets: loss.value(_logits(model(inputs)), targets)
    if spec.kind == "tuner":
        generator = torch.Generator().manual_seed(spec.seed)
        validation = batches(data, "validation", task.batch, generator)
        return Tuner(Dropout(loss=loss), validation).step
    epsilon = spec.kind.partition(":")[2]
    engine = Antithetic(float(epsilon)) if epsilon else "auto"
    return Analytic(loss=loss, engine=engine, fraction=task.fraction, batch_dim=data.batch_dim)


TUNING_SEED = 0
"""The seed of every search. The reported seeds are 1, 2, …"""
_SAME_COST = 1.05  # at equal time, a method whose step costs less than this keeps all its epochs

RunRecords = dict[str, dict[str, Any]]
"""Records by :attr:`Spec.key`."""


@dataclass(frozen=True)
class BoardMethod:
    """A way to train, and the options that the search tunes."""

    label: str
    kind: str  # of its specs
    tunes_p: bool = False
    tunes_decay: bool = False  # with the best p


METHODS = {
    "none": BoardMethod("no regularization", "none"),
    "decay": BoardMethod("weight decay", "none", tunes_decay=True),
    "dropout": BoardMethod("dropout", "dropout", tunes_p=True),
    "dropout-decay": BoardMethod("dropout + decay", "dropout", tunes_p=True, tunes_decay=True),
    "analytic": BoardMethod("Analytic", "analytic", tunes_p=True),
    "analytic-decay": BoardMethod("Analytic + decay", "analytic", tunes_p=True, tunes_decay=True),
    "analytic-quarter-step": BoardMethod("Analytic, ε₀ = 1/4", "analytic:0.25", tunes_p=True),
    "analytic-whole-step": BoardMethod("Analytic, ε₀ = 1", "analytic:1", tunes_p=True),
    "tuner": BoardMethod("tuner (dropout)", "tuner"),
}
"""The methods by name."""


class TaskRuns:
    """The runs of one task, with and without a record.

    Args:
        task: a name in ``TASKS``.
        records: the records of all tasks.
        seeds: the number of reported seeds.
    """

    def __init__(self, task: str, records: RunRecords, seeds: int) -> None:
        self.name, self.task, self.records = task, TASKS[task], records
        self.seeds = range(1, seeds + 1)
        excluded = self.task.excluded_methods
        self.methods = {name: m for name, m in METHODS.items() if name not in excluded}

    def missing(self) -> list[Spec]:
        """Return the runs without a record that can start now.

        Other runs may follow: the weight decay is tuned after p, and the reported seeds need both.
        """
        return [s for s in dict.fromkeys(self._needed()) if s.key not in self.records]

    def _needed(self) -> Iterator[Spec]:
        for name, method in self.methods.items():
            yield from self._search(method)[0]
            for equal_time in (False, True):
                spec = self.chosen_spec(name, equal_time=equal_time)
                if spec is not None:
                    yield from (replace(spec, seed=seed) for seed in self.seeds)

    def _search(self, method: BoardMethod) -> tuple[list[Spec], Spec | None]:
        """Return the runs of a method's search, and the best of them once all have a record.

        The search tries every p first, and then every weight decay with the best p.
        """
        start = Spec(self.name, method.kind, 0.2, 0.0, TUNING_SEED, self.task.epochs)
        probabilities = self.task.probabilities if method.tunes_p else (start.p,)
        specs = [replace(start, p=p) for p in probabilities]
        best = self._best(specs)
        if method.tunes_decay and best is not None:
            specs += [replace(best, decay=decay) for decay in self.task.decays]
            best = self._best(specs)
        return specs, best

    def _best(self, specs: Sequence[Spec]) -> Spec | None:
        """Return the spec with the lowest validation loss; None if one has no record."""
        if any(s.key not in self.records for s in specs):
            return None
        return min(specs, key=lambda s: float(self.records[s.key]["validation"]))

    def chosen_spec(self, name: str, *, equal_time: bool) -> Spec | None:
        """Return the spec that a method's search chose; None if the search has not ended.

        With ``equal_time``, it has as many epochs as fit into the time of dropout's run.
        """
        _, best = self._search(METHODS[name])
        if best is None or not equal_time:
            return best
        cost = self.step_cost(name)
        if cost is None:
            return None
        epochs = best.epochs if cost < _SAME_COST else max(1, int(best.epochs / cost))
        return replace(best, epochs=epochs)

    def step_cost(self, name: str) -> float | None:
        """Return the CPU time of a step divided by dropout's, both measured in the search."""
        seconds = self._seconds_per_step(METHODS[name].kind)
        dropout_seconds = self._seconds_per_step("dropout")
        return None if seconds is None or dropout_seconds is None else seconds / dropout_seconds

    def _seconds_per_step(self, kind: str) -> float | None:
        """Return the median over the runs of that kind on the tuning seed; None without a record."""
        search = {"task": self.name, "kind": kind, "seed": TUNING_SEED}.items()
        runs = [r for r in self.records.values() if search <= r["spec"].items()]
        seconds = [record["seconds"] / record["steps"] for record in runs]
        return statistics.median(seconds) if seconds else None

    def test_losses(self, name: str, *, equal_time: bool) -> dict[int, float]:
        """Return the test losses of a method by seed."""
        spec = self.chosen_spec(name, equal_time=equal_time)
        if spec is None:
            return {}
        records = {seed: self.records.get(replace(spec, seed=seed).key) for seed in self.seeds}
        return {seed: record["test"] for seed, record in records.items() if record is not None}


def read_records(folder: Path) -> RunRecords:
    """Return the records in the ``records/`` of a folder, by key."""
    return {path.stem: read_json(path) for path in sorted((folder / "records").glob("*.json"))}


def run_board(
    folder: Path,
    root: Path,
    *,
    tasks: Iterable[str] = tuple(TASKS),
    seeds: int = 5,
    jobs: int = 1,
    on_record: Callable[[Spec, dict[str, Any]], None] = lambda spec, record: None,
) -> int:
    """Execute the runs without a record, task by task, and return the number of records.

    Args:
        folder: the folder of results; the records are in its ``records/``.
        root: the folder of the corpora.
        tasks: names in ``TASKS``.
        seeds: the number of reported seeds.
        jobs: the number of runs in parallel, with one thread each.
        on_record: called with the spec and the record of every new run.
    """
    with naming_disk_errors(folder):
        (folder / "records").mkdir(parents=True, exist_ok=True)
    records = read_records(folder)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        for task in tasks:
            while missing := TaskRuns(task, records, seeds).missing():
                specs = {pool.submit(run_spec, s, str(root.absolute())): s for s in missing}
                for future in as_completed(specs):
                    spec, record = specs[future], future.result()
                    records[spec.key] = record
                    write_json(folder / "records" / f"{spec.key}.json", record)
                    on_record(spec, record)
    return len(records)
