"""The tables of docs/tuning.md, from the records: `python benchmarks/tuning_report.py`."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scipy import stats

Run = dict[str, Any]
METHODS = {
    "none": ("none",),
    "dropout, best of 6 p": ("grid",),
    "random search, 10 runs": ("random",),
    "weight decay, best of 4": ("decay",),
    "dropout + decay": ("grid", "dropout+decay"),
    "Analytic, best of 4 p": ("analytic",),
    "Tuner on Analytic": ("tuner-analytic",),
    "Tuner on Dropout": ("tuner-dropout",),
}
"""Each method and the runs that it pays for; the last kind is what it chooses from."""
RUNS = {"none": 1, "grid": 6, "random": 10, "decay": 4, "dropout+decay": 3, "analytic": 4}
REFERENCE = "dropout, best of 6 p"


def read(path: Path) -> list[Run]:
    """The records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def outcome(runs: list[Run], kinds: tuple[str, ...]) -> tuple[float, float] | None:
    """The test loss of the run that validation chooses, and the seconds of all runs."""
    mine = {kind: [r for r in runs if r["method"] == kind] for kind in kinds}
    if any(len(found) < RUNS.get(kind, 1) for kind, found in mine.items()):
        return None
    chosen = min(mine[kinds[-1]], key=lambda r: r["validation"])
    return chosen["test"], sum(r["seconds"] for found in mine.values() for r in found)


def interval(values: list[float]) -> str:
    """The mean and its 95 % interval, by Student's t."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:+.3f}"
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    half = stats.t.ppf(0.975, len(values) - 1) * spread / math.sqrt(len(values))
    return f"{mean:+.3f} ± {half:.3f}"


def table(records: Iterable[Run]) -> list[str]:
    """For each task and method: test loss, its paired difference to the grid, and the price."""
    by_task: dict[str, dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_task[record["task"]][record["seed"]].append(record)
    lines = [
        "| task | method | seeds | test loss | minus the grid's, paired | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for task, seeds in by_task.items():
        found = {
            method: {seed: o for seed, runs in seeds.items() if (o := outcome(runs, kinds))}
            for method, kinds in METHODS.items()
        }
        base = found[REFERENCE]
        for method, results in found.items():
            if not results:
                continue
            paired = [results[s][0] - base[s][0] for s in results if s in base]
            mean = sum(o[0] for o in results.values()) / len(results)
            cost = sum(o[1] for o in results.values()) / len(results)
            apart = "" if method == REFERENCE or not paired else interval(paired)
            lines.append(
                f"| {task} | {method} | {len(results)} | {mean:.3f} | {apart} | {cost:.0f} |"
            )
    return lines


RULES = {
    "trustheld": "relative slope, clipped (trust region)",
    "adamheld": "Adam's moments",
    "zheld": "z-score, added up",
    "propheld": "z-score, proportional (kept)",
}


def rules(records: Iterable[Run]) -> list[str]:
    """For each task and rule: the validation loss from each start and step size."""
    cells: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    usual = {"trustheld": 0.1, "adamheld": 0.2, "zheld": 0.2, "propheld": 0.3}
    best: dict[str, float] = {}
    for record in records:
        how = record["how"]
        if how["kind"] == "fixed":
            best[how["task"]] = min(best.get(how["task"], math.inf), record["validation"])
        if how["kind"] not in RULES or how["precond"]:
            continue
        step = how["kappa"] / usual[how["kind"]]
        size = "" if 0.9 < step < 1.1 else " × ⅓" if step < 1.0 else " × 3.3"
        cells[how["task"], how["kind"]][f"{how['start']}{size}"] = record["validation"]
    columns = ["0.05", "0.2", "0.6", "0.2 × ⅓", "0.2 × 3.3"]
    heads = ["from p = 0.05", "0.2", "0.6", "0.2, step × ⅓", "0.2, step × 3.3"]
    lines = [f"| task (best fixed p) | rule | {' | '.join(heads)} |", "|---" * 7 + "|"]
    for (task, kind), found in sorted(cells.items()):
        values = " | ".join(f"{found[c]:.3f}" if c in found else "" for c in columns)
        lines.append(f"| {task} ({best[task]:.3f}) | {RULES[kind]} | {values} |")
    return lines


def main() -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/tuning"))
    options = parser.parse_args()
    print("\n".join(rules(read(options.results / "rules.jsonl"))), end="\n\n")
    print("\n".join(table(read(options.results / "runs.jsonl"))))


if __name__ == "__main__":
    main()
