"""The tables of docs/tuning.md, from the records: `python benchmarks/tuning_report.py --write`."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

Run = dict[str, Any]
SEARCHES = ("none", "grid", "random", "decay", "dropout+decay")
METHODS: dict[str, tuple[str, ...]] = {
    "none": ("none",),
    "dropout, p = 0.1": ("p = 0.1",),
    "dropout, best of 6 p": ("grid",),
    "random search, 10 runs": ("random",),
    "weight decay, best of 4": ("decay",),
    "dropout + decay, 9 runs": ("grid", "dropout+decay"),
    "Analytic, best of 4 p": ("analytic",),
    "all searches, 24 runs": SEARCHES,
    "Tuner on Analytic": ("tuner-analytic",),
    "Tuner on Dropout": ("tuner-dropout",),
    "Tuner on Dropout and decay": ("tuner-dropout+decay",),
}
"""Each method: the runs that it pays for and chooses from."""
RUNS = {"none": 1, "grid": 6, "random": 10, "decay": 4, "dropout+decay": 3, "analytic": 4}
REFERENCES = ("dropout, best of 6 p", "all searches, 24 runs")
DRAWS = 10000
"""Of the bootstrap."""


def read(folder: Path, pattern: str) -> list[Run]:
    """The records of all files whose name matches."""
    files = sorted(folder.glob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def outcome(runs: list[Run], method: str) -> tuple[float, float] | None:
    """The test loss of the run that validation chooses, and what all runs cost in single runs."""
    mine = {kind: [r for r in runs if r["method"] == kind] for kind in METHODS[method]}
    if "p = 0.1" in mine:
        mine["p = 0.1"] = [r for r in runs if r["method"] == "grid" and r["how"]["ps"][0] == 0.1]
    tuner = method.startswith("Tuner")  # compared with a run on the same machine and day
    grid = [r["seconds"] for r in runs if r["method"] == ("one run" if tuner else "grid")]
    if any(len(found) < RUNS.get(kind, 1) for kind, found in mine.items()):
        return None
    chosen = min((r for found in mine.values() for r in found), key=lambda r: r["validation"])
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
    """For each task and method: test loss, its paired differences to two searches, and the cost."""
    by_task: dict[str, dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_task[record["task"]][record["seed"]].append(record)
    lines = [
        "| task | method | test loss | minus best of 6 p | minus all searches | cost |",
        "|---" * 6 + "|",
    ]
    for task, seeds in sorted(by_task.items()):
        every = [{m: outcome(runs, m) for m in METHODS} for runs in seeds.values()]
        complete = [{m: o for m, o in found.items() if o is not None} for found in every]
        complete = [found for found in complete if len(found) == len(METHODS)]
        for place, method in enumerate(METHODS if complete else ()):
            apart = [
                "" if method == other else interval([f[method][0] - f[other][0] for f in complete])
                for other in REFERENCES
            ]
            mean = float(np.mean([found[method][0] for found in complete]))
            cost = float(np.median([found[method][1] for found in complete]))
            name = f"{task}, {len(complete)} seeds" if not place else ""
            lines.append(f"| {name} | {method} | {mean:.3f} | {' | '.join(apart)} | {cost:.1f} |")
    return lines


def one_run(records: list[Run]) -> list[str]:
    """For each task the test loss with p = 0.1, and what a tuner changes in it and in the time."""
    tuners = ["tuner-dropout", "tuner-dropout+decay", "tuner-analytic"]
    by_key = {(r["task"], r["seed"], r["method"]): r for r in records}
    tasks = sorted({task for task, _, method in by_key if method == "one run"})
    lines = [
        "| task | p = 0.1 | Tuner on Dropout | … and decay | on Analytic | cost |",
        "|---" * 6 + "|",
    ]
    for task in tasks:
        seeds = [s for t, s, method in by_key if (t, method) == (task, "one run")]
        seeds = [s for s in seeds if all((task, s, t) in by_key for t in tuners)]
        if not seeds:
            continue
        plain = [by_key[task, s, "one run"] for s in seeds]
        cells = [f"{np.mean([r['test'] for r in plain]):.3f}"]
        for tuner in tuners:
            mine = [by_key[task, s, tuner] for s in seeds]
            cells.append(
                interval([a["test"] - b["test"] for a, b in zip(mine, plain, strict=True)])
            )
        times = [by_key[task, s, tuners[0]]["seconds"] for s in seeds]
        ratio = np.median([a / b["seconds"] for a, b in zip(times, plain, strict=True)])
        count = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
        lines.append(f"| {task}, {count} | {' | '.join(cells)} | {ratio:.1f} |")
    return lines


def mean_cells(records: Iterable[Run], heads: list[str], column: Any) -> list[str]:
    """A row for each task with the mean test loss of each column; the count of seeds beside it."""
    cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if (head := column(record)) is not None:
            cells[record["task"]][head].append(record["test"])
    lines = [f"| task | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for task, found in sorted(cells.items()):
        values = [f"{np.mean(found[h]):.3f} ({len(found[h])})" if found[h] else "" for h in heads]
        lines.append(f"| {task} | {' | '.join(values)} |")
    return lines


def rules(records: Iterable[Run]) -> list[str]:
    """The rules that were compared, from p = 0.1 at the rate 1.1."""
    names = {
        ("moments", "optimizer"): "moments, the optimizer's step",
        ("growing steps", "optimizer"): "growing steps, the optimizer's",
        ("sign", "optimizer"): "sign, the optimizer's",
        ("moments", "own"): "moments, own step",
        ("growing steps", "own"): "growing steps, own",
    }

    def column(r: Run) -> str | None:
        if r["rule"] == "fixed":
            return {0.0: "none", 0.1: "p = 0.1"}.get(r["start"])
        usual = (r["rate"], r["start"], r["decay"]) == (1.1, 0.1, 0)
        return names[r["rule"], r["update"]] if usual else None

    shown = [r for r in records if r["task"].endswith(("mlp", "convnet"))]
    return mean_cells(shown, ["none", "p = 0.1", *names.values()], column)


def starts(records: list[Run]) -> list[str]:
    """The kept rule from each start and with each rate, and some fixed p."""

    def column(r: Run) -> str | None:
        if r["kind"] == "fixed":
            return f"fixed {r['start']:g}"
        if r["rate"] != 0.7:
            return f"0.1, rate {r['rate']:g}"
        return f"from {r['start']:g}"

    runs = Counter((r["task"], r["seed"]) for r in records)
    complete = [r for r in records if runs[r["task"], r["seed"]] == max(runs.values())]
    tuned = ["from 0.05", "from 0.1", "from 0.2", "from 0.6", "0.1, rate 0.22", "0.1, rate 2.2"]
    fixed = ["fixed 0", "fixed 0.05", "fixed 0.1", "fixed 0.2"]
    return mean_cells(complete, [*fixed, *tuned], column)


SIGNALS = ("one step", "one step, held-out", "Adam", "horizon 30", "horizon 100", "horizon 300")
"""Benefits of the gradient, as z-scores."""


def signals(records: list[Run]) -> list[str]:
    """How well each signal predicts what more noise does by the end of the run."""
    sites = [r for r in records if "one step" in r]
    truth = np.array([np.mean(r["truth"]) > 0.0 for r in sites])
    scores = {f"branches of {n} steps": [r[f"branch {n}"][0] for r in sites] for n in (20, 60, 150)}
    scores |= {name: [r.get(name, 0.0) for r in sites] for name in SIGNALS}
    lines = ["| signal | right sign | AUC |", "|---|---|---|"]
    for name, values in scores.items():
        found = np.array(values)
        right = int(np.sum((found > 0.0) == truth))
        lines.append(f"| {name} | {right} of {len(sites)} | {auc(found, truth):.2f} |")
    return lines


def advice(records: list[Run], runs: list[Run]) -> list[str]:
    """For each case what the advice says, what the search says, and what the advised p costs."""
    lines = [
        "| task | seed | says | p (range) | none minus best of 6 p | advised p | p = 0.1 |",
        "|---" * 7 + "|",
    ]
    for r in records:
        mine = [x for x in runs if (x["task"], x["seed"]) == (r["task"], r["seed"])]
        grid = {x["how"]["ps"][0]: x for x in mine if x["method"] in ("grid", "none")}
        best = min((x for p, x in grid.items() if p), key=lambda x: x["validation"])
        near = min(grid, key=lambda p: abs(_log_odds(p) - _log_odds(r["p"])))
        gain, cost, usual = (grid[p]["test"] - best["test"] for p in (0.0, near, 0.1))
        where = f"{r['p']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
        lines.append(
            f"| {r['task']} | {r['seed']} | {r['says']} | {where} | {gain:+.3f} | {cost:+.3f} | "
            f"{usual:+.3f} |"
        )
    return lines


def _log_odds(p: float) -> float:
    p = max(p, 0.01)
    return math.log(p / (1.0 - p))


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


SCORES = {
    "z": "z",
    "z_held": "z, regularizer on held-out batches",
    "one": "z, slope over a finite stride",
    "horizon": "z, slope over a finite stride, horizon of 100 steps",
    "branch": "two branches of 20 steps, with and without the site",
}


def benefit(records: list[Run], cases: list[Run], others: list[Run]) -> list[str]:
    """The AUC of the benefit and of other scores, and the cases behind it."""
    rows = benefit_cases(records, cases)
    for row in rows:
        mine = [r for r in others if (r["task"], r["p"]) == (row["task"], row["p"])]
        row |= {k: np.mean([r[k][row["site"]] for r in mine]) for k in ("one", "horizon", "branch")}
    groups = [(row["task"], row["p"]) for row in rows]
    lines = ["| score | truth | cases that help | AUC (95 %) |", "|---|---|---|---|"]
    for truth, when in (("truth", "end of training"), ("early", "best epoch")):
        labels = np.array([row[truth] > 0.0 for row in rows])
        for score, what in SCORES.items():
            value = auc_interval(np.array([row[score] for row in rows]), labels, groups)
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
        "signals": signals(read(folder, "signals.jsonl")),
        "results": table(read(folder, "runs*.jsonl")),
        "one run": one_run(read(folder, "runs*.jsonl")),
        "advice": advice(read(folder, "advise.jsonl"), read(folder, "runs*.jsonl")),
        "benefit": benefit(
            read(folder, "benefit.jsonl"),
            json.loads((folder / "cases.json").read_text()),
            read(folder, "horizon.jsonl"),
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
