"""Does the benefit of a site predict the effect of retraining without the site? See `--help`.

A case is a task, a p, and a site or weight decay. `results/tuning/cases.json` lists the cases; it was
written before the first run. For each seed, a model is trained with p at every site and diagnosed at its
last weights (`undrop.diagnose` with the optimizer at half the peak learning rate, four repeats). Then it
is trained again without each site in turn, and once with the weight decay that the diagnosis tried.
These definitions were also fixed before the first run:

- the truth of a case is the test loss without the site (or weight decay) minus that with it, at the end
  of training, as a mean over seeds; it is positive if the site helps;
- the score of a case is the mean over seeds of z, the benefit divided by its standard error;
- the result is the AUC of the score for the sign of the truth. For its interval, groups of cases with
  the same task and p are drawn with replacement, because these cases share their trained models.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from tuning_tasks import TASKS, Data, Task, batches

import undrop
from tuning import Records, dropout_slots, plain, train
from undrop.diagnosis.measure.estimates import Estimate

CASES = Path("results/tuning/cases.json")
PROBABILITIES = (0.1, 0.35)
SEEDS = (10, 11, 12, 13)
"""No other experiment uses these seeds."""
REPEATS, BATCHES = 4, 16
DECAY = "weight decay"
Run = dict[str, Any]


def site_names(task: Task, data: Data) -> list[str]:
    """Return the names of the sites, in the order of `dropout_slots`."""
    inputs, _ = next(batches(data, "train", task.batch, None))
    return [site.name for site in undrop.sites(task.model(0.5), inputs)]


def write_cases(root: Path) -> None:
    """Write the cases: all sites of all tasks, and weight decay."""
    cases = []
    for task in TASKS.values():
        names = [*site_names(task, task.data(root, SEEDS[0])), DECAY]
        for p in PROBABILITIES:
            cases += [{"task": task.name, "p": p, "what": name} for name in names]
    lines = ",\n".join(json.dumps(case) for case in cases)
    CASES.write_text(f"[\n{lines}\n]\n")


def as_list(found: Estimate) -> list[float | None]:
    """Return the benefit, its standard error and z."""
    return [found.value, found.stderr, found.z]


def diagnose(task: Task, data: Data, model: nn.Module, optimizer: Any) -> Run:
    """Return the benefit of each site and of weight decay."""
    order = torch.Generator().manual_seed(0)
    hook = optimizer.register_step_pre_hook(
        lambda *_: clip_grad_norm_(model.parameters(), task.clip) and None
    )
    found = undrop.diagnose(
        model,
        list(batches(data, "train", task.batch, order))[:BATCHES],
        validation=list(batches(data, "validation", task.batch, order))[:BATCHES],
        optimizer=optimizer,
        learning_rate=0.5 * task.lr,
        loss=task.loss(),
        implicit=False,
        draws=REPEATS,
        seconds=1000.0,
        batch_dim=data.batch_dim,
        generator=torch.Generator().manual_seed(0),
        progress=False,
    ).benefit
    hook.remove()
    assert found is not None
    scores = {name: as_list(estimate) for name, estimate in found.sites.items()}
    scores |= {DECAY: as_list(found.weight_decay), "every site": as_list(found.every_site)}
    return {"benefit": scores, "decay": found.decay}


def train_and_diagnose(task: Task, data: Data, seed: int, p: float) -> Run:
    """Train with p at every site, and diagnose."""
    kept: list[Any] = []

    def method(model: nn.Module, loss: undrop.Loss, optimizer: Any, *rest: Any):
        kept.extend((model, optimizer))
        return plain(model, loss, optimizer, *rest)

    result = train(task, data, seed, {"start": p}, method)
    return {**result, **diagnose(task, data, *kept)}


def run(root: Path, records: Records, seed: int, task: Task, p: float, what: list[str]) -> None:
    """Make the runs of one seed, task and p that have no record yet."""
    data = task.data(root, seed)
    key: Run = {"task": task.name, "p": p, "seed": seed}
    if not records.find(**key, changed=None):
        records.add({**key, "changed": None, **train_and_diagnose(task, data, seed, p)})
    (whole,) = records.find(**key, changed=None)
    names = site_names(task, data)
    assert len(names) == len(dropout_slots(task.model(p)))
    for name in what:
        if not records.find(**key, changed=name):
            ps = [0.0 if other == name else p for other in names]
            how = {"start": p, "ps": ps, "decay": whole["decay"] if name == DECAY else 0.0}
            records.add({**key, "changed": name, **train(task, data, seed, how, plain)})
            print(key, name, flush=True)


def main() -> None:
    """Write the cases if there are none; otherwise make all runs that have no record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpora")
    parser.add_argument("--records", type=Path, default=Path("results/tuning/benefit.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not CASES.exists():
        write_cases(options.data)
        return
    groups: dict[tuple[str, float], list[str]] = {}
    for case in json.loads(CASES.read_text()):
        groups.setdefault((case["task"], case["p"]), []).append(case["what"])
    records = Records(options.records)
    for seed in SEEDS:
        for (name, p), what in groups.items():
            run(options.data, records, seed, TASKS[name], p, what)


if __name__ == "__main__":
    main()
