"""Does a site's benefit say what retraining without the site does? See `--help`.

A case is a task, a p and a site; `results/tuning/cases.json` lists them, written before the first run.
For each seed the model is trained with p at every site and diagnosed at its last weights, then trained
again without each site in turn. Fixed beforehand:

- truth of a case: the mean over seeds of the test loss without the site minus with it, at the end of
  training; positive where the site helps;
- score of a case: the mean over seeds of z, the site's benefit over its standard error;
- result: the AUC of the score for the sign of the truth, with an interval by drawing groups of cases of
  one task and p with replacement, since cases of a group share their trained models.

Beside it the records hold the loss at the epoch that is best on the validation part, and z with the
regularizer measured on held-out batches (`z_held`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tuning_tasks import TASKS, Data, Task, batches

import undrop
from tuning import Records, dropout_slots, plain, train
from undrop.diagnosis.measure.estimates import Estimate

CASES = Path("results/tuning/cases.json")
PROBABILITIES = {"wikitext-gpt": (0.2,)}
"""The p of a task's cases; 0.2 and 0.5 for the others."""
SEEDS = (5, 6, 7, 8)
"""None of the seeds of the comparison of methods."""
DRAWS, BATCHES = 4, 16
Run = dict[str, Any]


def site_names(task: Task, data: Data) -> list[str]:
    """The sites, in the order of `dropout_slots`."""
    inputs, _ = next(batches(data, "train", task.batch, None))
    return [site.name for site in undrop.sites(task.model(0.5), inputs)]


def write_cases(root: Path) -> None:
    """All sites of all tasks."""
    cases = []
    for task in TASKS.values():
        names = site_names(task, task.data(root, SEEDS[0]))
        for p in PROBABILITIES.get(task.name, (0.2, 0.5)):
            cases += [{"task": task.name, "p": p, "site": name} for name in names]
    lines = ",\n".join(json.dumps(case) for case in cases)
    CASES.write_text(f"[\n{lines}\n]\n")


def z(found: Estimate) -> float:
    """The figure over its standard error."""
    return found.value / found.stderr if found.stderr else 0.0


def diagnosed(task: Task, data: Data, model: nn.Module, part: str) -> undrop.Diagnosis:
    """The benefit of each site, its regularizer measured on batches of a part."""
    order = torch.Generator().manual_seed(0)
    held = list(batches(data, "validation", task.batch, order))
    half = len(held) // 2
    own = list(batches(data, "train", task.batch, order)) if part == "train" else held[:half]
    return undrop.diagnose(
        model,
        own[:BATCHES],
        validation=held[half:][:BATCHES],
        learning_rate=task.lr,
        loss=task.loss(),
        implicit=False,
        draws=DRAWS,
        seconds=20.0,
        batch_dim=data.dim,
        generator=torch.Generator().manual_seed(0),
        progress=False,
    )


def with_every_site(task: Task, data: Data, seed: int, p: float) -> Run:
    """Train with p at every site, and diagnose."""
    kept: list[nn.Module] = []

    def method(model: nn.Module, *rest: Any):
        kept.append(model)
        return plain(model, *rest)

    result = train(task, data, seed, {"start": p}, method)
    for part, key in (("train", "z"), ("validation", "z_held")):
        benefit = diagnosed(task, data, kept[0], part).benefit
        assert benefit is not None
        result[key] = {name: z(found) for name, found in benefit.sites.items()}
    return result


def run(root: Path, records: Records, seed: int, task: Task, p: float, sites: list[str]) -> None:
    """The runs of one seed, task and p that have no record yet."""
    data = task.data(root, seed)
    key: Run = {"task": task.name, "p": p, "seed": seed}
    if not records.find(**key, without=None):
        records.add({**key, "without": None, **with_every_site(task, data, seed, p)})
    names = site_names(task, data)
    assert len(names) == len(dropout_slots(task.model(p)))
    for site in sites:
        if not records.find(**key, without=site):
            ps = [0.0 if name == site else p for name in names]
            found = train(task, data, seed, {"start": p, "ps": ps}, plain)
            records.add({**key, "without": site, **found})
            print(key, site, flush=True)


def main() -> None:
    """Write the cases if there are none, then run what has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpora")
    parser.add_argument("--records", type=Path, default=Path("results/tuning/benefit.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not CASES.exists():
        write_cases(options.data)
        return
    cases = json.loads(CASES.read_text())
    groups: dict[tuple[str, float], list[str]] = {}
    for case in cases:
        groups.setdefault((case["task"], case["p"]), []).append(case["site"])
    records = Records(options.records)
    for seed in SEEDS:
        for (name, p), sites in groups.items():
            run(options.data, records, seed, TASKS[name], p, sites)


if __name__ == "__main__":
    main()
