"""Does the tuner depend on its start and its rate? See `--help`.

A tuner starts at p = 0.1 whatever the model declares. This script forces other starts and rates.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tuning_tasks import TASKS, Task

from tuning import Records, dropout_slots, plain, train, tuner_method

SEEDS = (5, 6, 7)
"""The results use other seeds."""
CELLS = [(0.1, 0.7), (0.05, 0.7), (0.2, 0.7), (0.6, 0.7), (0.1, 0.22), (0.1, 2.2)]
"""Starts and rates."""


def plan(task: Task) -> list[tuple[dict[str, Any], dict[str, Any], Any]]:
    """Return the keys, the settings and the method of each run."""
    n = len(dropout_slots(task.model(0.5)))
    runs: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
        (
            {"kind": "tuner", "start": start, "rate": rate},
            {"start": 0.2},
            tuner_method("dropout", start=start, rate=rate),
        )
        for start, rate in CELLS
    ]
    return [*runs, ({"kind": "fixed", "start": 0.1, "rate": 0.0}, {"ps": [0.1] * n}, plain)]


def main() -> None:
    """Make all runs that have no record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpora")
    parser.add_argument("--records", type=Path, default=Path("results/tuning/starts.jsonl"))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(options.records)
    for seed, name in product(SEEDS, options.tasks):
        task = TASKS[name]
        data = task.data(options.data, seed)
        for label, how, method in plan(task):
            key = {"task": task.name, "seed": seed, **label}
            if not records.find(**key):
                result = train(task, data, seed, how, method)
                records.add({**key, **result})
                print(key, result["validation"], result["test"], flush=True)


if __name__ == "__main__":
    main()
