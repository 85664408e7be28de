"""Does `undrop.advise` agree with a full search? See `--help`.

A case is a task and a seed of the comparison of methods, whose records have the full search. Fixed
before the first run:

- the cases: all six tasks with the seeds 0, 1 and 2;
- the advice: 200 steps at the task's learning rate, with its batches in random order;
- truth: dropout helps if the test loss of the best of six p (by validation) is below that without it;
- the start: the advised p is that of the nearest run of the search (p = 0 and six p, on the scale of
  log σ², where 0 stands at 0.01), and costs what that run's test loss is above the best's.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from tuning_tasks import TASKS, Task, batches

import undrop
from tuning import Records

SEEDS = (0, 1, 2)
STEPS = 200


class Clipped(torch.optim.AdamW):
    """AdamW that clips gradients as the task does."""

    clip = 1.0

    def step(self, closure: None = None) -> None:
        """Clip, then step."""
        clip_grad_norm_(self.param_groups[0]["params"], self.clip)
        super().step(closure)


class ClippedSGD(torch.optim.SGD):
    """SGD that clips gradients as the task does."""

    clip = 0.25

    def step(self, closure: None = None) -> None:
        """Clip, then step."""
        clip_grad_norm_(self.param_groups[0]["params"], self.clip)
        super().step(closure)


def advised(task: Task, root: Path, seed: int) -> undrop.tuning.Advice:
    """The advice for one case."""
    data = task.data(root, seed)
    torch.manual_seed(1000 + seed)
    model, order = task.model(0.5), torch.Generator().manual_seed(seed)
    epochs = STEPS * task.batch // data.train[0].shape[data.dim] + 1
    every = [b for _ in range(epochs) for b in batches(data, "train", task.batch, order)]
    held = list(batches(data, "validation", task.batch, torch.Generator().manual_seed(0)))
    kind = ClippedSGD if task.sgd else Clipped
    return undrop.advise(
        *(model, every, held),
        steps=STEPS,
        objective=undrop.Dropout(loss=task.loss()),
        optimizer=partial(kind, lr=task.lr, weight_decay=0.0),
    )


def main() -> None:
    """Run what has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpora")
    parser.add_argument("--records", type=Path, default=Path("results/tuning/advise.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(options.records)
    for seed, task in product(SEEDS, TASKS.values()):
        key = {"task": task.name, "seed": seed}
        if not records.find(**key):
            every = advised(task, options.data, seed).to_json()["every"]
            records.add({**key, **{k: every[k] for k in ("says", "p", "low", "high")}})
            print(key, every, flush=True)


if __name__ == "__main__":
    main()
