"""Make the tables of docs/tuning.md from the records: `python benchmarks/tuning_report.py --write`."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

Run = dict[str, Any]
SEARCHES = ("none", "grid", "random", "decay", "dropout+decay")
METHODS: dict[str, tuple[str, ...]] = {
    "none": ("none",),
    "dropout, p = 0.1": ("p = 0.1",),
    "p = 0.1 and λ = 0.3/Σ lr": ("one run+decay",),
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
"""For each method, the kinds of runs that it chooses from; its cost is that of all these runs."""
RUNS = {"none": 1, "grid": 6, "random": 10, "decay": 4, "dropout+decay": 3, "analytic": 4}
REFERENCES = ("dropout, best of 6 p", "all searches, 24 runs")
SHORT = ("best of 6 p", "all searches")
DRAWS = 10000
"""The number of samples of a bootstrap."""


def read(folder: Path, pattern: str) -> list[Run]:
    """Read the records of all files whose name matches."""
    files = sorted(folder.glob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def outcome(runs: list[Run], method: str) -> tuple[float, float] | None:
    """Return the test loss of the run with the lowest validation loss, and the cost in single runs.

    None if a run has no record yet.
    """
    mine = {kind: [r for r in runs if r["method"] == kind] for kind in METHODS[method]}
    if "p = 0.1" in mine:
        mine["p = 0.1"] = [r for r in runs if r["method"] == "grid" and r["how"]["ps"][0] == 0.1]
    # The times of tuners, and of their starts, are divided by those of a run on the same day.
    reference = "one run" if "Tuner" in method or "Σ lr" in method else "grid"
    grid = [r["seconds"] for r in runs if r["method"] == reference]
    if any(len(found) < RUNS.get(kind, 1) for kind, found in mine.items()):
        return None
    chosen = min((r for found in mine.values() for r in found), key=lambda r: r["validation"])
    seconds = sum(r["seconds"] for found in mine.values() for r in found)
    return chosen["test"], seconds / float(np.median(grid)) if grid else math.nan


def interval(values: list[float], digits: int = 3) -> str:
    """Format the mean and its 95 % interval, by Student's t."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:+.{digits}f}"
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    half = stats.t.ppf(0.975, len(values) - 1) * spread / math.sqrt(len(values))
    return f"{mean:+.{digits}f} ± {half:.{digits}f}"


Outcomes = list[dict[str, tuple[float, float]]]
"""For each seed: the test loss and the cost of every method."""


def outcomes(records: Iterable[Run]) -> dict[str, Outcomes]:
    """Return the outcomes of each task, for the seeds that have the runs of all methods."""
    by_task: dict[str, dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_task[record["task"]][record["seed"]].append(record)
    found: dict[str, Outcomes] = {}
    for task, seeds in sorted(by_task.items()):
        every = [{m: outcome(runs, m) for m in METHODS} for runs in seeds.values()]
        known = [{m: o for m, o in one.items() if o is not None} for one in every]
        found[task] = [one for one in known if len(one) == len(METHODS)]
    return {task: seeds for task, seeds in found.items() if seeds}


def paired_difference(seeds: Outcomes, method: str, other: str) -> str:
    """Format the paired difference of two methods; "" if they are the same."""
    return "" if method == other else interval([s[method][0] - s[other][0] for s in seeds])


def table(found: dict[str, Outcomes]) -> list[str]:
    """Return a table of each task and method: test loss, differences from two searches, and cost."""
    heads = ("task", "method", "test loss", *(f"minus {name}" for name in SHORT), "cost")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for task, seeds in found.items():
        for place, method in enumerate(METHODS):
            cells = [paired_difference(seeds, method, other) for other in REFERENCES]
            mean = float(np.mean([one[method][0] for one in seeds]))
            cost = float(np.median([one[method][1] for one in seeds]))
            name = f"{task}, {len(seeds)} seeds" if not place else ""
            lines.append(f"| {name} | {method} | {mean:.3f} | {' | '.join(cells)} | {cost:.1f} |")
    return lines


def summary(found: dict[str, Outcomes]) -> list[str]:
    """Return a table of each task: the difference of tuned runs from two searches, and their cost."""
    tuners = {"p": "Tuner on Dropout", "p and λ": "Tuner on Dropout and decay"}
    pairs = list(product(zip(SHORT, REFERENCES, strict=True), tuners.items()))
    heads = [f"{tuned}, minus {short}" for (short, _), (tuned, _) in pairs]
    heads = ["task", SHORT[0], *heads, *(f"{tuned}, cost" for tuned in tuners)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for task, seeds in found.items():
        mean = float(np.mean([one[REFERENCES[0]][0] for one in seeds]))
        costs = [f"{np.median([one[m][1] for one in seeds]):.1f}" for m in tuners.values()]
        cells = [
            f"{mean:.3f}",
            *(paired_difference(seeds, m, o) for (_, o), (_, m) in pairs),
            *costs,
        ]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return lines


def one_run(found: dict[str, Outcomes]) -> list[str]:
    """Return a table of single runs: how they change the test loss of p = 0.1, in percent."""
    fixed, decayed = "dropout, p = 0.1", "p = 0.1 and λ = 0.3/Σ lr"
    both = "Tuner on Dropout and decay"
    pairs = [("Tuner on Dropout", fixed), ("Tuner on Analytic", fixed), (decayed, fixed)]
    pairs += [(both, fixed), (both, decayed)]
    heads = ["task", "p = 0.1", *(method for method, _ in pairs[:-1]), f"{both}, against its start"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    every = [one for seeds in found.values() for one in seeds]
    for task, seeds in {**found, "all": every}.items():
        mean = "" if seeds is every else f"{np.mean([one[fixed][0] for one in seeds]):.3f}"
        cells = [changes([(one[a][0], one[b][0]) for one in seeds]) for a, b in pairs]
        lines.append(f"| {task} | {mean} | {' | '.join(cells)} |")
    return lines


CELLS = [(0.1, 0.7), (0.05, 0.7), (0.2, 0.7), (0.6, 0.7), (0.1, 0.22), (0.1, 2.2)]
"""Starts and rates."""
HEADS = [f"from {start:g}, rate {rate:g}" for start, rate in CELLS]


def rules(records: list[Run]) -> list[str]:
    """Return a table of the rules: how they change the test loss of p = 0.1, by start and rate."""
    names = ["moments, full noise at once", "moments", "growing", "growing, by evidence"]
    fixed = {
        (r["task"], r["seed"]): r["test"]
        for r in records
        if (r["rule"], r["start"]) == ("fixed", 0.1)
    }
    lines = [f"| rule | {' | '.join(HEADS)} |", "|---" * (len(HEADS) + 1) + "|"]
    for name in names:
        cells = []
        for start, rate in CELLS:
            mine = [r for r in records if (r["rule"], r["start"], r["rate"]) == (name, start, rate)]
            cells.append(changes([(r["test"], fixed[r["task"], r["seed"]]) for r in mine]))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def changes(pairs: list[tuple[float, float]]) -> str:
    """Format the mean change in percent, its interval and the number of pairs."""
    ratios = [100.0 * (mine / other - 1.0) for mine, other in pairs]
    return f"{interval(ratios, 1)} ({len(ratios)})" if ratios else ""


def starts(records: list[Run]) -> list[str]:
    """Return a table of the tuner: how it changes the test loss of p = 0.1, by start and rate."""
    by_key = {(r["task"], r["seed"], r["kind"], r["start"], r["rate"]): r["test"] for r in records}
    tasks = sorted({r["task"] for r in records})
    lines = [f"| task | p = 0.1 | {' | '.join(HEADS)} |", "|---" * (len(HEADS) + 2) + "|"]
    whole: dict[tuple[float, float], list[tuple[float, float]]] = {cell: [] for cell in CELLS}
    for task in tasks:
        fixed = {k[1]: v for k, v in by_key.items() if (k[0], *k[2:]) == (task, "fixed", 0.1, 0.0)}
        cells = []
        for cell in CELLS:
            key = (task, "tuner", *cell)
            pairs = [(v, fixed[k[1]]) for k, v in by_key.items() if (k[0], *k[2:]) == key]
            whole[cell] += pairs
            cells.append(changes(pairs))
        lines.append(f"| {task} | {np.mean(list(fixed.values())):.3f} | {' | '.join(cells)} |")
    return [*lines, f"| all | | {' | '.join(changes(pairs) for pairs in whole.values())} |"]


def variants(records: list[Run], base: str = "p = 0.1") -> list[str]:
    """Return a table of the tuner's variants: how they change the test loss of the base, in percent."""
    by_key = {(r["what"], r["task"], r["seed"]): r["test"] for r in records}
    tasks = list(dict.fromkeys(r["task"] for r in records))
    names = [n for n in dict.fromkeys(r["what"] for r in records) if n != base]
    lines = [f"| | {' | '.join([*tasks, 'all'])} |", "|---" * (len(tasks) + 2) + "|"]
    for name in names:
        cells, whole = [], []
        for task in tasks:
            seeds = [s for what, t, s in by_key if (what, t) == (name, task)]
            pairs = [(by_key[name, task, s], by_key[base, task, s]) for s in seeds]
            whole += pairs
            cells.append(changes(pairs))
        lines.append(f"| {name} | {' | '.join([*cells, changes(whole)])} |")
    return lines


def cost(records: list[Run]) -> list[str]:
    """Return a table of the cost that tuning adds to a step of each model."""
    lines = ["| model | added by tuning |", "|---|---|"]
    for r in records:
        low, high = 100.0 * min(r["all"]), 100.0 * max(r["all"])
        lines.append(f"| {r['model']} | {100.0 * r['added']:.0f} % ({low:.0f} to {high:.0f}) |")
    return lines


SIGNALS = ("one step", "one step, held-out", "Adam", "horizon 30", "horizon 100", "horizon 300")
"""The signals that use the gradient; the records hold their z-scores."""


def signals(records: list[Run]) -> list[str]:
    """Return a table of how well each signal predicts the effect of more noise on the whole run."""
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


def advice_outcomes(records: list[Run]) -> list[Run]:
    """Return, for each case, the advice, and how far p = 0 and p = 0.1 are above the best of 6 p."""
    found = []
    for r in (r for r in records if r["kind"] == "advice"):
        case = (r["task"], r["seed"])
        runs = {x["p"]: x for x in records if x["kind"] == "run" and (x["task"], x["seed"]) == case}
        if len(runs) == 7:
            best = min((x for p, x in runs.items() if p), key=lambda x: x["validation"])
            gain, usual = (runs[p]["test"] - best["test"] for p in (0.0, 0.1))
            found.append({**r, "gain": gain, "usual": usual})
    return found


def advice_summary(cases: list[Run]) -> list[str]:
    """Return a sentence on how often the advice is right."""
    truth = [case["gain"] > 0.0 for case in cases]
    given = [case["gain"] > 0.0 for case in cases if case["evidence"] == "helps"]
    right = stats.binomtest(sum(given), max(len(given), 1)).proportion_ci(method="wilson")
    gaps = np.array([case["gap"]["value"] for case in cases])
    area = auc_interval(gaps, np.array(truth), [case["task"] for case in cases])
    return [
        f'Dropout helps in {sum(truth)} of {len(truth)} cases. The verdict "helps" was given in '
        f"{len(given)} and is right in {sum(given)} of them (95 % interval of the share: "
        f"{right.low:.2f} to {right.high:.2f}). AUC of the gap: {area}, by drawing tasks."
    ]


def advice_case_table(cases: list[Run]) -> list[str]:
    """Return a table of the cases: the advice, and the result of the search."""
    heads = ("task", "seed", "gap", "evidence", "none minus best of 6 p", "p = 0.1 minus best")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in cases:
        gap = f"{case['gap']['value']:+.2f} ± {case['gap']['stderr']:.2f}"
        lines.append(
            f"| {case['task']} | {case['seed']} | {gap} | {case['evidence']} | {case['gain']:+.3f} | "
            f"{case['usual']:+.3f} |"
        )
    return lines


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the chance that a case that helps scores above a case that does not; ties count half."""
    good, bad = scores[labels], scores[~labels]
    if not len(good) or not len(bad):
        return math.nan
    return float(np.mean(np.sign(good[:, None] - bad[None, :]) * 0.5 + 0.5))


def auc_interval(scores: np.ndarray, labels: np.ndarray, groups: list[Any]) -> str:
    """Format the AUC, with a 95 % interval from drawing whole groups with replacement."""
    random, names = np.random.default_rng(0), sorted(set(groups))
    members = [np.flatnonzero([g == name for g in groups]) for name in names]
    found = []
    for _ in range(DRAWS):
        drawn = np.concatenate([members[i] for i in random.integers(len(names), size=len(names))])
        found.append(auc(scores[drawn], labels[drawn]))
    low, high = np.nanpercentile(found, [2.5, 97.5])
    return f"{auc(scores, labels):.2f} ({low:.2f} to {high:.2f})"


def benefit_cases(records: list[Run], cases: list[Run]) -> list[Run]:
    """Return, for each case, the means over seeds of the truth and of z, and the clear verdicts."""
    by_key = {(r["task"], r["p"], r["seed"], r["changed"]): r for r in records}
    found = []
    for case in cases:
        task, p, what = case["task"], case["p"], case["what"]
        seeds = [s for t, q, s, changed in by_key if (t, q, changed) == (task, p, what)]
        if not seeds:
            continue
        pairs = [(by_key[task, p, s, what], by_key[task, p, s, None]) for s in seeds]
        sign = -1.0 if what == DECAY else 1.0  # its run has decay, those of the sites lack the site
        scores = [whole["benefit"][what] for _, whole in pairs]
        row = {
            "truth": sign * np.mean([r["last_test"] - w["last_test"] for r, w in pairs]),
            "early": sign * np.mean([r["test"] - w["test"] for r, w in pairs]),
            "benefit": np.mean([value for value, _, _ in scores]),
            "z": np.mean([z for _, _, z in scores]),
            "clear": [z > 0.0 for _, _, z in scores if abs(z) > CLEAR],
        }
        found.append({**case, "seeds": len(pairs), **row})
    return found


DECAY, CLEAR = "weight decay", 2.0


def benefit_summary(rows: list[Run]) -> list[str]:
    """Return a table of the AUC of the benefit, and of how often its sign is right."""
    sites, decays = ([r for r in rows if (r["what"] == DECAY) == on] for on in (False, True))
    heads = ("cases", "truth", "that help", "AUC of z (95 %)", "right sign", "right beyond z = ±2")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for what, mine in (("sites", sites), ("weight decay", decays), ("all", rows)):
        for truth, when in (("truth", "end of training"), ("early", "best epoch")):
            labels = np.array([row[truth] > 0.0 for row in mine])
            z = np.array([row["z"] for row in mine])
            area = auc_interval(z, labels, [(row["task"], row["p"]) for row in mine])
            right = int(((z > 0.0) == labels).sum())
            clear = [c == t for row, t in zip(mine, labels, strict=True) for c in row["clear"]]
            cells = (f"{labels.sum()} of {len(mine)}", area, f"{right} of {len(mine)}")
            lines.append(
                f"| {what} | {when} | {' | '.join(cells)} | {sum(clear)} of {len(clear)} models |"
            )
    return lines


def benefit_case_table(rows: list[Run]) -> list[str]:
    """Return a table of the cases."""
    lines = ["| task | p | what | loss without it | benefit | z |", "|---" * 6 + "|"]
    for row in rows:
        lines.append(
            f"| {row['task']} | {row['p']:g} | `{row['what']}` | {row['truth']:+.3f} | "
            f"{row['benefit']:+.4f} | {row['z']:+.1f} |"
        )
    return lines


def score_choice(folder: Path) -> list[str]:
    """Return a table of possible definitions of the benefit, on 37 cases of other seeds."""
    cases = json.loads((folder / "cases-before.json").read_text())
    runs = {
        (r["task"], r["p"], r["seed"], r["without"]): r
        for r in read(folder, "benefit-before.jsonl")
    }
    seeds = sorted({seed for _, _, seed, _ in runs})
    branches, slopes = read(folder, "branches.jsonl"), read(folder, "horizon.jsonl")
    scores: dict[str, list[float]] = defaultdict(list)
    labels, groups = [], []
    for case in cases:
        task, p, site = case["task"], case["p"], case["site"]
        pairs = [(runs[task, p, s, site], runs[task, p, s, None]) for s in seeds]
        labels.append(np.mean([r["last_test"] - w["last_test"] for r, w in pairs]) > 0.0)
        groups.append((task, p))
        scores["slope of one step"].append(float(np.mean([w["z"][site] for _, w in pairs])))
        far = [r["horizon"][site] for r in slopes if (r["task"], r["p"]) == (task, p)]
        scores["slope, horizon of 100 steps"].append(float(np.mean(far)))
        for kind, steps in product(("the run's optimizer, half its rate", "a new optimizer, its rate"),
                                   ("10", "20", "50", "100")):  # fmt: skip
            found = [r[kind][steps][site] for r in branches if (r["task"], r["p"]) == (task, p)]
            scores[f"runs of {steps} steps, {kind}"].append(float(np.mean(found)))
    lines = ["| score | AUC (95 %) | right sign |", "|---|---|---|"]
    truth = np.array(labels)
    for name, values in scores.items():
        found = np.array(values)
        right = int(((found > 0.0) == truth).sum())
        lines.append(f"| {name} | {auc_interval(found, truth, groups)} | {right} of {len(truth)} |")
    return lines


def tables(folder: Path) -> dict[str, list[str]]:
    """Return all tables of the page, by the names of their markers."""
    results = outcomes(read(folder, "runs*.jsonl"))
    advised = advice_outcomes(read(folder, "advise.jsonl"))
    fixed = json.loads((folder / "cases.json").read_text())
    cases = benefit_cases(read(folder, "benefit.jsonl"), fixed)
    return {
        "rules": rules(read(folder, "rules.jsonl")),
        "variants": variants(read(folder, "variants.jsonl")),
        "steps": variants(read(folder, "steps.jsonl")),
        "far": variants(read(folder, "far.jsonl")),
        "decay": variants(read(folder, "decay.jsonl"), "as before"),
        "cost": cost(read(folder, "cost.jsonl")),
        "starts": starts(read(folder, "starts.jsonl")),
        "signals": signals(read(folder, "signals.jsonl")),
        "summary": summary(results),
        "results": table(results),
        "one run": one_run(results),
        "advice": advice_summary(advised),
        "advice cases": advice_case_table(advised),
        "choice": score_choice(folder),
        "benefit": benefit_summary(cases),
        "benefit cases": benefit_case_table(cases),
    }


def fill(page: str, parts: dict[str, list[str]]) -> str:
    """Return the page with these tables between their markers."""
    for name, lines in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        page = before + begin + "\n".join(["", *lines, "", end]) + rest.split(end)[1]
    return page


def main() -> None:
    """Print the tables as Markdown, or put them into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results/tuning"))
    parser.add_argument("--write", action="store_true", help="put the tables into docs/tuning.md")
    options = parser.parse_args()
    parts, page = tables(options.results), Path("docs/tuning.md")
    for lines in parts.values():
        print("\n".join(lines), end="\n\n")
    if options.write:
        page.write_text(fill(page.read_text(), parts))


if __name__ == "__main__":
    main()
