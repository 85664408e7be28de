"""Does the tuner need tuning? Runs from other starts and with other rates; see `--help`.

A tuner starts at p = 0.2 whatever the model declares; here it is made to start elsewhere. The last run
of each task has plain dropout with p = 0.6 for the steps before a tuner's first measurement and with
p = 0.2 after them: what a start of 0.6 costs although no rule is at work.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tuning_tasks import TASKS, Data, Task, batches

import undrop
from tuning import Records, dropout_slots, plain, train
from undrop.tuning.rule import log_odds

SEED = 9
"""None of the seeds of the comparison of methods."""
CELLS = [(0.05, 0.3), (0.2, 0.3), (0.6, 0.3), (0.2, 0.1), (0.2, 1.0)]
"""Starts and rates."""
FIXED = (0.0, 0.05, 0.1, 0.2, 0.35)
FIRST = 20
"""The default interval of a tuner."""


class Started(undrop.Tuner):
    """A tuner that starts at another p."""

    start = 0.2

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        super()._begin(model, inputs)
        for knob in self._knobs.values():
            knob.value = log_odds(self.start)
        self._apply()


def tuned(start: float, rate: float):
    """A tuned run on plain dropout."""

    def method(model: nn.Module, loss: undrop.Loss, optimizer: Any, data: Data, size: int):
        held = batches(data, "validation", size, torch.Generator().manual_seed(0))
        tuner = Started(undrop.Dropout(loss=loss), held, rate=rate)
        tuner.start = start

        def backward(inputs: Any, targets: Any) -> None:
            tuner.step(model, inputs, targets).backward()

        return backward, dict

    return method


def switched(model: nn.Module, loss: undrop.Loss, optimizer: Any, data: Data, size: int):
    """Plain dropout: the p that the model declares at first, then 0.2."""
    step, _ = plain(model, loss, optimizer, data, size)
    slots, done = dropout_slots(model), 0

    def backward(inputs: Any, targets: Any) -> None:
        nonlocal done
        if done == FIRST:
            for module, name in slots:
                setattr(module, name, 0.2)
        done += 1
        step(inputs, targets)

    return backward, dict


def plan(task: Task) -> list[tuple[dict[str, Any], dict[str, Any], Any]]:
    """What each run is called, its settings and its method."""
    n = len(dropout_slots(task.model(0.5)))
    runs: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
        ({"kind": "tuner", "start": s, "rate": r}, {"start": 0.2}, tuned(s, r)) for s, r in CELLS
    ]
    runs += [({"kind": "fixed", "start": p, "rate": 0.0}, {"ps": [p] * n}, plain) for p in FIXED]
    return [*runs, ({"kind": "switched", "start": 0.6, "rate": 0.0}, {"start": 0.6}, switched)]


def main() -> None:
    """Run what has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpora")
    parser.add_argument("--records", type=Path, default=Path("results/tuning/starts.jsonl"))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(options.records)
    for task in (TASKS[name] for name in options.tasks):
        data = task.data(options.data, SEED)
        for label, how, method in plan(task):
            key = {"task": task.name, "seed": SEED, **label}
            if not records.find(**key):
                result = train(task, data, SEED, how, method)
                records.add({**key, **result})
                print(key, result["validation"], flush=True)


if __name__ == "__main__":
    main()
