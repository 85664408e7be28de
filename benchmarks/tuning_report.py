"""The tables of docs/tuning.md, from the records: `python benchmarks/tuning_report.py --write`."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

Run = dict[str, Any]
SEARCHES = ("none", "grid", "random", "decay", "dropout+decay")
METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": (("none",), ("none",)),
    "dropout, best of 6 p": (("grid",), ("grid",)),
    "random search, 10 runs": (("random",), ("random",)),
    "weight decay, best of 4": (("decay",), ("decay",)),
    "dropout + decay, 9 runs": (("grid", "dropout+decay"), ("grid", "dropout+decay")),
    "Analytic, best of 4 p": (("analytic",), ("analytic",)),
    "all searches, 24 runs": (SEARCHES, SEARCHES),
    "Tuner on Analytic": (("tuner-analytic",), ("tuner-analytic",)),
    "Tuner on Dropout": (("tuner-dropout",), ("tuner-dropout",)),
}
"""Each method: the runs that it pays for, and those that it chooses from."""
RUNS = {"none": 1, "grid": 6, "random": 10, "decay": 4, "dropout+decay": 3, "analytic": 4}
REFERENCE = "all searches, 24 runs"
DRAWS = 10000
"""Of the bootstrap."""


def read(folder: Path, pattern: str) -> list[Run]:
    """The records of all files whose name matches."""
    files = sorted(folder.glob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def outcome(runs: list[Run], method: str) -> tuple[float, float] | None:
    """The test loss of the run that validation chooses, and what all runs cost in single runs."""
    paid, choice = METHODS[method]
    mine = {kind: [r for r in runs if r["method"] == kind] for kind in paid}
    grid = [r["seconds"] for r in runs if r["method"] == "grid"]
    if any(len(found) < RUNS.get(kind, 1) for kind, found in mine.items()):
        return None
    chosen = min((r for kind in choice for r in mine[kind]), key=lambda r: r["validation"])
    seconds = sum(r["seconds"] for found in mine.values() for r in found)
    return chosen["test"], seconds / float(np.median(grid)) if grid else math.nan


def interval(values: list[float]) -> str:
    """The mean and its 95 % interval, by Student's t."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:+.3f}"
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    half = stats.t.ppf(0.975, len(values) - 1) * spread / math.sqrt(len(values))
    return f"{mean:+.3f} ± {half:.3f}"


def table(records: Iterable[Run]) -> list[str]:
    """For each task and method: test loss, its paired difference to the searches, and the cost."""
    by_task: dict[str, dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_task[record["task"]][record["seed"]].append(record)
    lines = [
        "| task | method | test loss | minus all searches' | cost |",
        "|---|---|---|---|---|",
    ]
    for task, seeds in sorted(by_task.items()):
        complete = {
            seed: {method: outcome(runs, method) for method in METHODS}
            for seed, runs in seeds.items()
        }
        complete = {s: found for s, found in complete.items() if None not in found.values()}
        for place, method in enumerate(METHODS):
            results = {s: o for s, found in complete.items() if (o := found[method]) is not None}
            if not results:
                continue
            paired = [o[0] - (complete[s][REFERENCE] or o)[0] for s, o in results.items()]
            mean = sum(o[0] for o in results.values()) / len(results)
            cost = float(np.median([o[1] for o in results.values()]))
            apart = "" if method == REFERENCE else interval(paired)
            name = f"{task}, {len(results)} seed{'s' * (len(results) > 1)}" if not place else ""
            lines.append(f"| {name} | {method} | {mean:.3f} | {apart} | {cost:.1f} |")
    return lines


RULES = {
    "trustheld": "relative slope, clipped (trust region)",
    "adamheld": "Adam's moments",
    "zheld": "z-score, added up",
    "propheld": "z-score, proportional",
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


def starts(records: Iterable[Run]) -> list[str]:
    """For each task: the validation loss of the kept rule from each start and with each rate."""
    cells = [(0.05, 0.3), (0.2, 0.3), (0.6, 0.3), (0.2, 0.1), (0.2, 1.0)]
    heads = ["from p = 0.05", "0.2", "0.6", "0.2, rate 0.1", "0.2, rate 1"]
    by_task: dict[str, dict[tuple[str, float, float], float]] = defaultdict(dict)
    for r in records:
        by_task[r["task"]][r["kind"], r["start"], r["rate"]] = r["validation"]
    lines = [
        f"| task | best fixed p | {' | '.join(heads)} | plain: 0.6 for 20 steps, then 0.2 |",
        "|---" * 8 + "|",
    ]
    for task, found in sorted(by_task.items()):
        fixed = {p: value for (kind, p, _), value in found.items() if kind == "fixed"}
        p = min(fixed, key=lambda p: fixed[p], default=math.nan)
        values = [f"{fixed[p]:.3f} (p = {p:g})" if fixed else ""]
        keys = [("tuner", *cell) for cell in cells] + [("switched", 0.6, 0.0)]
        values += [f"{found[key]:.3f}" if key in found else "" for key in keys]
        lines.append(f"| {task} | {' | '.join(values)} |")
    return lines


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """The chance that a case that helps scores above one that does not; ties count half."""
    good, bad = scores[labels], scores[~labels]
    if not len(good) or not len(bad):
        return math.nan
    return float(np.mean(np.sign(good[:, None] - bad[None, :]) * 0.5 + 0.5))


def auc_interval(scores: np.ndarray, labels: np.ndarray, groups: list[Any]) -> str:
    """The AUC, with a 95 % interval by drawing whole groups with replacement."""
    random, names = np.random.default_rng(0), sorted(set(groups))
    members = [np.flatnonzero([g == name for g in groups]) for name in names]
    found = []
    for _ in range(DRAWS):
        drawn = np.concatenate([members[i] for i in random.integers(len(names), size=len(names))])
        found.append(auc(scores[drawn], labels[drawn]))
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return f"{auc(scores, labels):.2f} ({low:.2f} to {high:.2f})"


def benefit_cases(records: list[Run], cases: list[Run]) -> list[Run]:
    """For each case the mean over seeds of the truth and of the scores."""
    by_key = {(r["task"], r["p"], r["seed"], r["without"]): r for r in records}
    found = []
    for case in cases:
        task, p, site = case["task"], case["p"], case["site"]
        pairs = [
            (r, by_key[task, p, seed, None])
            for (t, q, seed, without), r in by_key.items()
            if (t, q, without) == (task, p, site)
        ]
        if pairs:
            row = {
                "truth": np.mean([r["last_test"] - whole["last_test"] for r, whole in pairs]),
                "early": np.mean([r["test"] - whole["test"] for r, whole in pairs]),
                "z": np.mean([whole["z"][site] for _, whole in pairs]),
                "z_held": np.mean([whole["z_held"][site] for _, whole in pairs]),
            }
            found.append({**case, "seeds": len(pairs), **row})
    return found


def benefit(records: list[Run], cases: list[Run]) -> list[str]:
    """The AUC of the benefit, and the cases behind it."""
    rows = benefit_cases(records, cases)
    if not rows:
        return []
    groups = [(row["task"], row["p"]) for row in rows]
    lines = ["| score | truth | cases that help | AUC (95 %) |", "|---|---|---|---|"]
    for score, truth in (("z", "truth"), ("z_held", "truth"), ("z", "early"), ("z_held", "early")):
        labels = np.array([row[truth] > 0.0 for row in rows])
        value = auc_interval(np.array([row[score] for row in rows]), labels, groups)
        what = "z" if score == "z" else "z, regularizer on held-out batches"
        when = "end of training" if truth == "truth" else "best epoch"
        lines.append(f"| {what} | {when} | {labels.sum()} of {len(rows)} | {value} |")
    lines += ["", "| task | p | site | seeds | loss without it | z |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['task']} | {row['p']:g} | `{row['site']}` | {row['seeds']} | "
            f"{row['truth']:+.3f} | {row['z']:+.1f} |"
        )
    return lines


def main() -> None:
    """Print the tables as Markdown, or put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/tuning"))
    parser.add_argument("--write", action="store_true", help="put the tables into docs/tuning.md")
    options = parser.parse_args()
    folder = options.results
    parts = {
        "rules": rules(read(folder, "rules.jsonl")),
        "starts": starts(read(folder, "starts.jsonl")),
        "results": table(read(folder, "runs*.jsonl")),
        "benefit": benefit(
            read(folder, "benefit.jsonl"), json.loads((folder / "cases.json").read_text())
        ),
    }
    page = Path("docs/tuning.md")
    text = page.read_text()
    for name, lines in parts.items():
        print("\n".join(lines), end="\n\n")
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        filled = "\n".join(["", *lines, "", end])
        text = f"{before}{begin}{filled}{rest.split(end)[1]}"
    if options.write:
        page.write_text(text)


if __name__ == "__main__":
    main()
