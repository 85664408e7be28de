"""Is the verdict of `undrop.advise` right? See `--help`.

A case is a task and a seed. We fixed these points before the first run:

- the cases: all six tasks with four seeds that no other experiment has used;
- the advice: 200 steps at the task's learning rate, with its batches in random order;
- the rule: dropout "helps" if the 95 % interval of the validation loss minus the training loss lies
  above 0, else there is "no evidence either way"; the rule was chosen on the searches of tuning.py;
- the truth: dropout helps if the best of six p (by validation loss) has a lower test loss than p = 0.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from tuning_tasks import TASKS, Data, Task, batches

import undrop
from tuning import GRID, Records, dropout_slots, plain, train

SEEDS = (14, 15, 16, 17)
STEPS = 200


def clipping_optimizer(kind: Any, task: Task, parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with the task's learning rate that clips gradients as the task does."""
    weights = list(parameters)
    made: torch.optim.Optimizer = kind(weights, lr=task.lr, weight_decay=0.0)
    made.register_step_pre_hook(lambda *_: clip_grad_norm_(weights, task.clip) and None)
    return made


def advice_of(task: Task, data: Data, seed: int) -> undrop.tuning.Advice:
    """Return the advice for one case."""
    torch.manual_seed(1000 + seed)
    model, order = task.model(0.5), torch.Generator().manual_seed(seed)
    epochs = STEPS * task.batch // data.train[0].shape[data.batch_dim] + 1
    every = [b for _ in range(epochs) for b in batches(data, "train", task.batch, order)]
    held = list(batches(data, "validation", task.batch, torch.Generator().manual_seed(0)))
    kind = torch.optim.SGD if task.sgd else torch.optim.AdamW
    return undrop.advise(
        *(model, every, held),
        steps=STEPS,
        objective=undrop.Dropout(loss=task.loss()),
        optimizer=partial(clipping_optimizer, kind, task),
    )


def main() -> None:
    """Make all runs that have no record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpora")
    parser.add_argument("--records", type=Path, default=Path("results/tuning/advise.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(options.records)
    for seed, task in product(SEEDS, TASKS.values()):
        key = {"task": task.name, "seed": seed}
        data = task.data(options.data, seed)
        if not records.find(**key, kind="advice"):
            found = advice_of(task, data, seed).to_json()
            records.add({**key, "kind": "advice", "p": 0.1, **found})
        n = len(dropout_slots(task.model(0.5)))
        for p in (0.0, *GRID):
            if not records.find(**key, kind="run", p=p):
                result = train(task, data, seed, {"ps": [p] * n}, plain)
                kept = {k: result[k] for k in ("validation", "test")}
                records.add({**key, "kind": "run", "p": p, **kept})
        print(key, flush=True)


if __name__ == "__main__":
    main()
