"""The cost that tuning adds to an average step: `python benchmarks/tuning_cost.py`.

A step is the pass, the backward pass and AdamW's update, with undrop.Dropout in both cases. Steps with
and without the tuner alternate, and their processor times are compared over each interval between
trials, so the load of the machine matters little. Validation batches are as large as training batches.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import undrop
from undrop.lab.models import AWDLSTM, GPT, MLP, ConvNet
from undrop.tuning.tuner import INTERVAL

INTERVALS = 6


def tokens(vocabulary: int, steps: int, batch: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that draws random windows (time, batch)."""
    shape = (steps, batch)
    return lambda: (torch.randint(vocabulary, shape), torch.randint(vocabulary, shape))


SUBJECTS = {
    "MLP 784-256-256-10, batch 64": (
        lambda: MLP((784, 256, 256, 10), dropout=0.2),
        lambda: (torch.randn(64, 784), torch.randint(10, (64,))),
    ),
    "ConvNet 32-64, 28×28, batch 32": (
        lambda: ConvNet(),
        lambda: (torch.randn(32, 1, 28, 28), torch.randint(10, (32,))),
    ),
    "LSTM 2×100, 2,000 words, 35×20": (
        lambda: AWDLSTM(2000, embedding_size=100, hidden_size=100, layers=2, weight_dropout=0.0),
        tokens(2000, 35, 20),
    ),
    "GPT 2×64, 1,000 words, 32×16": (
        lambda: GPT(1000, size=64, layers=2, heads=4, context=32),
        tokens(1000, 32, 16),
    ),
}


def seconds(
    step: Callable[..., undrop.Step],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
) -> float:
    """Return the processor seconds of one step."""
    began = time.process_time()
    optimizer.zero_grad()
    step(model, *batch).backward()
    optimizer.step()
    return time.process_time() - began


def added_cost(make: Callable[[], nn.Module], batch: Callable[[], tuple]) -> list[float]:
    """Return (tuned - plain)/plain for each interval between trials."""
    torch.manual_seed(0)
    tuner = undrop.Tuner(undrop.Dropout(), [batch() for _ in range(4)])
    sides = []
    for step in (undrop.Dropout(), tuner.step):
        model = make()
        sides.append((step, model, torch.optim.AdamW(model.parameters(), lr=1e-4)))
    ratios = []
    for _ in range(INTERVALS + 1):
        data = [batch() for _ in range(INTERVAL)]
        plain, tuned = map(sum, zip(*([seconds(*s, d) for s in sides] for d in data), strict=True))
        ratios.append(tuned / plain - 1.0)
    return ratios[1:]  # the first interval includes the search for sites


def main() -> None:
    """Print one line of JSON for each model."""
    torch.set_num_threads(1)
    for name, subject in SUBJECTS.items():
        ratios = sorted(added_cost(*subject))
        row = {"model": name, "added": statistics.median(ratios), "all": ratios}
        print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
