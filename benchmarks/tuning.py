"""Compare ways to choose dropout on the tasks of tuning_tasks.py: `python benchmarks/tuning.py --help`.

Every run appends one line of JSON to the records when it ends. A run that has a record is not repeated.
Searches choose the run with the lowest loss on the validation part. All methods keep the weights of
the epoch with the lowest validation loss, and report the loss on the test part.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tuning_tasks import TASKS, Data, Task, batches, schedule

import undrop
from undrop.tuning.moves import log_odds

GRID = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65)
ANALYTIC = (0.1, 0.2, 0.35, 0.5)
RANDOM_RUNS = 10
START = 0.2
"""The p that the models of tuned runs declare. It has no effect: tuners start at 0.1."""
SHRINKAGE = 0.3
"""The start of tuned weight decay: λ times the sum of all learning rates. It removes about a quarter of
the weights in a run."""
EVALUATIONS = 8
"""How often a run evaluates its validation part, to keep the best weights."""
Run = dict[str, Any]


def dropout_slots(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the module and the attribute that hold each p of the model."""
    slots = []
    for module in model.modules():
        for name in ("p", "attention_dropout"):
            if getattr(module, name, 0.0) > 0.0:
                slots.append((module, name))
    return slots


def mean_loss(model: nn.Module, loss: undrop.Loss, data: Data, part: str) -> float:
    """Return the mean loss on a part of the data, without dropout."""
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for inputs, targets in batches(data, part, 200, None):
            output = model(inputs)
            logits = output[0] if isinstance(output, tuple) else output
            total += float(loss.value(logits, targets)) * targets.numel()
            count += targets.numel()
    model.train()
    return total / count


def train(task: Task, data: Data, seed: int, how: Run, method: Callable[..., Any]) -> Run:
    """Make one training run.

    ``method`` returns two functions: the backward pass of a step, and a report for the record.
    """
    began = time.process_time()
    torch.manual_seed(1000 + seed)
    model = task.model(how.get("start", 0.5))
    for (module, name), p in zip(dropout_slots(model), how.get("ps", []), strict=False):
        setattr(module, name, p)
    loss, step, curve = task.loss(), 0, []
    total = data.train[0].shape[data.batch_dim] // task.batch * task.epochs
    decay = how.get("decay", how.get("shrinkage", 0.0) / (0.5 * task.lr * total))
    kind = torch.optim.SGD if task.sgd else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=task.lr, weight_decay=decay)
    backward, report = method(model, loss, optimizer, data, task.batch)
    order = torch.Generator().manual_seed(seed)
    evaluation_epochs = {
        math.ceil(task.epochs * (k + 1) / EVALUATIONS) - 1 for k in range(EVALUATIONS)
    }
    for epoch in range(task.epochs):
        for inputs, targets in batches(data, "train", task.batch, order):
            optimizer.param_groups[0]["lr"] = schedule(task, step, total)
            optimizer.zero_grad()
            backward(inputs, targets)
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            step += 1
        if epoch not in evaluation_epochs:
            continue
        validation = mean_loss(model, loss, data, "validation")
        if not math.isfinite(validation):
            break
        paused = time.process_time()
        needed = validation < min(curve, default=[math.inf])[0] or epoch == task.epochs - 1
        curve.append([validation, mean_loss(model, loss, data, "test") if needed else math.inf])
        began += time.process_time() - paused
    best = min(curve, default=[math.inf, math.inf])
    seconds = time.process_time() - began
    last = curve[-1] if curve else best
    return {
        **{"validation": best[0], "test": best[1], "last_validation": last[0]},
        **{"last_test": last[1], "best_look": curve.index(best) if curve else -1},
        **{"steps": step, "seconds": round(seconds, 3), **report()},
    }


def plain(model: nn.Module, loss: undrop.Loss, optimizer: Any, data: Data, size: int):
    """Train with torch's own dropout and the plain loss, as all runs of a search do."""

    def backward(inputs: Any, targets: Any) -> None:
        output = model(inputs)
        loss.value(output[0] if isinstance(output, tuple) else output, targets).backward()

    return backward, dict


def analytic_objective(loss: undrop.Loss, data: Data) -> undrop.Analytic:
    """Return the analytic regularizers with Taylor's strength, on a quarter of the batch."""
    return undrop.Analytic(
        loss=loss,
        engine="antithetic",
        fraction=0.25,
        strength=undrop.TAYLOR,
        batch_dim=data.batch_dim,
    )


def analytic(model: nn.Module, loss: undrop.Loss, optimizer: Any, data: Data, size: int):
    """Train with the analytic regularizers at a fixed p."""
    objective = analytic_objective(loss, data)

    def backward(inputs: Any, targets: Any) -> None:
        objective(model, inputs, targets).backward()

    return backward, dict


class TunerWithStart(undrop.Tuner):
    """A tuner that can start at another p than 0.1."""

    start: float | None = None

    def _initialize(self, model: nn.Module, inputs: Any) -> None:
        super()._initialize(model, inputs)
        if self.start is not None:
            self._log_values |= dict.fromkeys(self.probabilities, log_odds(self.start))
            self._apply_values(self._log_values)


def tuner_method(kind: str, *, decay: bool = False, start: float | None = None, rate: float = 0.7):
    """Return a method that tunes p (and weight decay, with ``decay``), starting at p = ``start``."""

    def method(model: nn.Module, loss: undrop.Loss, optimizer: Any, data: Data, size: int):
        objective = (
            undrop.Dropout(loss=loss) if kind == "dropout" else analytic_objective(loss, data)
        )
        shuffled = torch.Generator().manual_seed(0)
        held = batches(data, "validation", size, shuffled)
        tuner = TunerWithStart(objective, held, optimizer=optimizer if decay else None, rate=rate)
        tuner.start = start

        def backward(inputs: Any, targets: Any) -> None:
            tuner.step(model, inputs, targets).backward()

        def report() -> Run:
            entries = [[e.step, e.tried, e.difference] for e in tuner.history.entries]
            paths = {n: tuner.history.path(n)[1] for n in tuner.history.values}
            rounded = {n: [float(f"{p:.3g}") for p in path] for n, path in paths.items()}
            return {"paths": rounded, "trials": entries}

        return backward, report

    return method


def search_runs(task: Task, seed: int) -> Iterator[tuple[str, Run]]:
    """Yield the runs of the searches that do not depend on the results of other runs."""
    n = len(dropout_slots(task.model(0.5)))
    yield "none", {"ps": [0.0] * n}
    for p in GRID:
        yield "grid", {"ps": [p] * n}
    for decay in task.decays:
        yield "decay", {"ps": [0.0] * n, "decay": decay}
    random = torch.Generator().manual_seed(77 + seed)
    for _ in range(RANDOM_RUNS):
        yield (
            "random",
            {"ps": [round(p, 4) for p in (0.7 * torch.rand(n, generator=random)).tolist()]},
        )


def decay_runs(task: Task, records: list[Run]) -> Iterator[tuple[str, Run]]:
    """Yield the runs with weight decay and the best p of the grid for this seed."""
    grid = [r for r in records if r["method"] == "grid"]
    if len(grid) == len(GRID):
        ps = min(grid, key=lambda r: r["validation"])["how"]["ps"]
        for decay in task.decays[1:]:
            yield "dropout+decay", {"ps": ps, "decay": decay}


class Records:
    """A file of JSON lines, one for each run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.all: list[Run] = [json.loads(line) for line in lines]

    def find(self, **keys: Any) -> list[Run]:
        """Return the records with these values."""
        return [r for r in self.all if all(r[k] == v for k, v in keys.items())]

    def add(self, record: Run) -> None:
        """Append a record."""
        self.all.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


METHODS = {
    "analytic": analytic,
    "tuner-analytic": tuner_method("analytic"),
    "tuner-dropout": tuner_method("dropout"),
    "tuner-dropout+decay": tuner_method("dropout", decay=True),
}


def single_runs(task: Task, *methods: str) -> list[tuple[str, Run]]:
    """Return the runs of methods without a search, and for each tuner a run with its fixed start."""
    plan: list[tuple[str, Run]] = []
    start = {"ps": [0.1] * len(dropout_slots(task.model(0.5)))}
    for method in methods:
        if method.startswith("tuner"):
            decay = {"shrinkage": SHRINKAGE} if method.endswith("decay") else {}
            plan.append((method, {"start": START, **decay}))
            plan.append(("one run+decay" if decay else "one run", {**start, **decay}))
    if "analytic" in methods:
        plan += [("analytic", {"start": p}) for p in ANALYTIC]
    return plan


def run(records: Records, task: Task, seed: int, root: Path, plan: list[tuple[str, Run]]) -> None:
    """Make the runs of the plan that have no record yet."""
    data = None
    for method, how in plan:
        key = {"task": task.name, "seed": seed, "method": method, "how": how}
        if records.find(**key):
            continue
        data = task.data(root, seed) if data is None else data
        result = train(task, data, seed, how, METHODS.get(method, plain))
        records.add({**key, **copy.deepcopy(result)})
        print(method, task.name, seed, how, result["validation"], result["test"], result["seconds"])


def main() -> None:
    """Make all runs that have no record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpora")
    parser.add_argument("--records", type=Path, default=Path("results/tuning/runs.jsonl"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument(
        "--methods", nargs="*", default=["search", *METHODS], help="search, or one of METHODS"
    )
    options = parser.parse_args()
    records = Records(options.records)
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        for task in (TASKS[name] for name in options.tasks):
            run(records, task, seed, options.data, single_runs(task, *options.methods))
            if "search" in options.methods:
                run(records, task, seed, options.data, list(search_runs(task, seed)))
                mine = records.find(task=task.name, seed=seed)
                run(records, task, seed, options.data, list(decay_runs(task, mine)))


if __name__ == "__main__":
    main()
