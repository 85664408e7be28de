"""The scoreboard's runs: the search on seed 0, then every method on the reported seeds."""

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
from undrop.lab.reproduce.worker import git_commit, single_threaded
from undrop.lab.scoreboard.data import Data, batches
from undrop.lab.scoreboard.tasks import TASKS, Task
from undrop.lab.train.environment import machine, versions
from undrop.losses import Loss
from undrop.objectives import Analytic, Dropout
from undrop.tuning import Tuner

_EVALUATIONS = 8  # during a run, on the validation and the test split

Step = Callable[[nn.Module, Tensor, Tensor], Any]
"""Returns something to call ``backward()`` on: a loss, or the step of an objective."""


@dataclass(frozen=True)
class Spec:
    """Everything that affects the result of a run."""

    task: str  # its name
    kind: str  # "none", "dropout", "analytic", "tuner", or "analytic:ε₀" with another ε₀
    p: float  # the drop probability of the model's dropouts
    decay: float  # the weight decay
    seed: int  # of the data, the weights and the noise
    epochs: int

    @property
    def key(self) -> str:
        """The hash of the run."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def execute(spec: Spec, root: str) -> dict[str, Any]:
    """Train, and return the record.

    Its losses are those at the best of eight evaluations by validation loss.
    """
    single_threaded()
    task = TASKS[spec.task]
    data = task.data(Path(root), spec.seed)
    torch.manual_seed(1_000 + spec.seed)
    model = task.model(Path(root), 0.0 if spec.kind == "none" else spec.p).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=task.lr, weight_decay=spec.decay)
    curve, seconds, steps = train(spec, model, optimizer, _step(spec, task, data), data)
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
    spec: Spec, model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, data: Data
) -> tuple[list[list[float]], float, int]:
    """Return [validation, test] at each evaluation, CPU seconds of training, and steps."""
    task = TASKS[spec.task]
    order = torch.Generator().manual_seed(spec.seed)
    per_epoch = 1 if data.whole else data.train[0].shape[data.dim] // task.batch
    total, steps, seconds, curve = per_epoch * spec.epochs, 0, 0.0, []
    evaluated = {math.ceil(spec.epochs * (k + 1) / _EVALUATIONS) - 1 for k in range(_EVALUATIONS)}
    for epoch in range(spec.epochs):
        began = time.process_time()
        for inputs, targets in batches(data, "train", task.batch, order):
            falling = 0.5 * (1.0 + math.cos(math.pi * steps / total))
            optimizer.param_groups[0]["lr"] = task.lr * falling
            optimizer.zero_grad()
            step(model, inputs, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            steps += 1
        seconds += time.process_time() - began
        if epoch in evaluated:
            losses = [_evaluate(model, task.loss(), data, part) for part in ("validation", "test")]
            if not math.isfinite(losses[0]):
                break
            curve.append(losses)
    return curve, seconds, steps


def _evaluate(model: nn.Module, loss: Loss, data: Data, part: str) -> float:
    """The mean loss on a part, without dropout."""
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for inputs, targets in batches(data, part, 200, None):
            rows = float((targets != -100).sum())
            total += float(loss.value(_logits(model(inputs)), targets)) * rows
            count += rows
    model.train()
    return total / count


def _logits(output: Any) -> Tensor:
    logits: Tensor = output[0] if isinstance(output, tuple) else output
    return logits


def _step(spec: Spec, task: Task, data: Data) -> Step:
    loss = task.loss()
    if spec.kind in ("none", "dropout"):  # plain PyTorch, the baseline
        return lambda model, inputs, targets: loss.value(_logits(model(inputs)), targets)
    if spec.kind == "tuner":
        shuffled = torch.Generator().manual_seed(spec.seed)
        held = batches(data, "validation", task.batch, shuffled)
        return Tuner(Dropout(loss=loss), held).step
    epsilon = spec.kind.partition(":")[2]
    engine = Antithetic(float(epsilon)) if epsilon else "auto"
    return Analytic(loss=loss, engine=engine, fraction=task.fraction, batch_dim=data.dim)


TUNING_SEED = 0
"""The seed of every search; the reported seeds are 1, 2, …"""
_SLOWER = 1.05  # a step that costs more than this means fewer epochs at equal time

RunRecords = dict[str, dict[str, Any]]  # by key


@dataclass(frozen=True)
class Method:
    """A way to train, and which of its options the search tunes."""

    label: str
    kind: str
    tunes_p: bool = False
    tunes_decay: bool = False  # at the best p


METHODS = {
    "none": Method("no regularization", "none"),
    "decay": Method("weight decay", "none", tunes_decay=True),
    "dropout": Method("dropout", "dropout", tunes_p=True),
    "dropout-decay": Method("dropout + decay", "dropout", tunes_p=True, tunes_decay=True),
    "analytic": Method("Analytic", "analytic", tunes_p=True),
    "analytic-decay": Method("Analytic + decay", "analytic", tunes_p=True, tunes_decay=True),
    "analytic-quarter-step": Method("Analytic, ε₀ = 1/4", "analytic:0.25", tunes_p=True),
    "analytic-whole-step": Method("Analytic, ε₀ = 1", "analytic:1", tunes_p=True),
    "tuner": Method("tuner (dropout)", "tuner"),
}
"""The methods by name."""


class Board:
    """The runs of one task with ``seeds`` reported seeds, and their results."""

    def __init__(self, task: str, records: RunRecords, seeds: int) -> None:
        self.name, self.task, self.records = task, TASKS[task], records
        self.seeds = range(1, seeds + 1)
        self.methods = {n: m for n, m in METHODS.items() if n not in self.task.refused}

    def missing(self) -> list[Spec]:
        """Return the runs without a record that do not wait for the result of another one."""
        return [s for s in dict.fromkeys(self._needed()) if s.key not in self.records]

    def _needed(self) -> Iterator[Spec]:
        for name, method in self.methods.items():
            yield from self._search(method)[0]
            for timed in (False, True):
                found = self.chosen(name, timed=timed)
                yield from () if found is None else (replace(found, seed=s) for s in self.seeds)

    def _search(self, method: Method) -> tuple[list[Spec], Spec | None]:
        """The runs to try, p first and then the decay at the best p, and the best if all are tried."""
        start = Spec(self.name, method.kind, 0.2, 0.0, TUNING_SEED, self.task.epochs)
        tries = (
            [replace(start, p=p) for p in self.task.probabilities] if method.tunes_p else [start]
        )
        best = self._best(tries)
        if method.tunes_decay and best is not None:
            tries += [replace(best, decay=decay) for decay in self.task.decays]
            best = self._best(tries)
        return tries, best

    def _best(self, tries: Sequence[Spec]) -> Spec | None:
        """The best by validation; None until all are tried."""
        if any(s.key not in self.records for s in tries):
            return None
        return min(tries, key=lambda s: float(self.records[s.key]["validation"]))

    def chosen(self, name: str, *, timed: bool) -> Spec | None:
        """Return the run that the search chose; if ``timed``, with epochs that fit dropout's time."""
        _, best = self._search(METHODS[name])
        cost = self.cost(name)
        if best is None or not timed:
            return best
        if cost is None:
            return None
        fit = best.epochs if cost < _SLOWER else max(1, int(best.epochs / cost))
        return replace(best, epochs=fit)

    def cost(self, name: str) -> float | None:
        """Return the CPU time of a step divided by dropout's, from the search."""
        own, plain = self._pace(METHODS[name].kind), self._pace("dropout")
        return None if own is None or plain is None else own / plain

    def _pace(self, kind: str) -> float | None:
        paces = [
            record["seconds"] / record["steps"]
            for record in self.records.values()
            if record["spec"]["task"] == self.name
            and record["spec"]["kind"] == kind
            and record["spec"]["seed"] == TUNING_SEED
        ]
        return statistics.median(paces) if paces else None

    def losses(self, name: str, *, timed: bool) -> dict[int, float]:
        """Return the test losses of a method by seed."""
        chosen = self.chosen(name, timed=timed)
        if chosen is None:
            return {}
        runs = {seed: self.records.get(replace(chosen, seed=seed).key) for seed in self.seeds}
        return {seed: run["test"] for seed, run in runs.items() if run is not None}


def read_records(folder: Path) -> RunRecords:
    """Return the records in a folder, by key."""
    return {path.stem: read_json(path) for path in sorted((folder / "records").glob("*.json"))}


def run_board(
    folder: Path,
    root: Path,
    *,
    tasks: Iterable[str] = tuple(TASKS),
    seeds: int = 5,
    jobs: int = 1,
    say: Callable[[Spec, dict[str, Any]], None] = lambda spec, record: None,
) -> int:
    """Do the runs without a record, task by task, and return the number of records.

    Args:
        folder: the folder of results; records are in its ``records/``.
        root: the folder of the corpora.
        tasks: names of ``TASKS``.
        seeds: the number of reported seeds.
        jobs: runs at a time, with one thread each.
        say: called with each new record.
    """
    with naming_disk_errors(folder):
        (folder / "records").mkdir(parents=True, exist_ok=True)
    records = read_records(folder)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        for task in tasks:
            while missing := Board(task, records, seeds).missing():
                waiting = {pool.submit(execute, s, str(root.absolute())): s for s in missing}
                for future in as_completed(waiting):
                    spec, record = waiting[future], future.result()
                    records[spec.key] = record
                    write_json(folder / "records" / f"{spec.key}.json", record)
                    say(spec, record)
    return len(records)
