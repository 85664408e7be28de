"""The cost of ``undrop.Watcher``: an observation relative to the steps between two observations.

    python benchmarks/watch.py [--repeats 7] [--interval 100] [--json FILE]

Steps and observations alternate, so that other work on the machine affects both alike. The cost is the
median over repeats of observation / (interval · step), in CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import undrop
from undrop.lab.models import AWDLSTM, GPT, MLP, LanguageModel


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def language(model: LanguageModel, length: int, batch: int) -> tuple[nn.Module, Any, Any, Any]:
    """Return a language model with a batch of random words."""
    words = torch.randint(model.vocab_size, (length + 1, batch))
    inputs = {"tokens": words[:-1], "state": None, "logits": False}
    return model, inputs, words[1:], model.loss()


CASES: dict[str, Callable[[], tuple[nn.Module, Any, Any, Any]]] = {
    "mlp": lambda: (
        MLP([784, 512, 512, 10]),
        torch.randn(128, 784),
        torch.randint(10, (128,)),
        undrop.CrossEntropy(),
    ),
    "awd-lstm": lambda: language(
        AWDLSTM(2000, embedding_size=100, hidden_size=200, layers=3), 35, 20
    ),
    "gpt": lambda: language(GPT(2000), 32, 4),
}


def cost(name: str, interval: int, repeats: int) -> dict[str, float]:
    """Return the median cost of watching one model."""
    torch.manual_seed(0)
    model, inputs, targets, loss = CASES[name]()
    model.train()
    objective = undrop.Dropout(loss=loss)
    watcher = undrop.Watcher(loss=loss, interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        objective(model, inputs, targets).backward()
        optimizer.step()

    def observe() -> None:
        watcher.observe(0, model, inputs, targets)

    step(), observe()  # warm up
    pairs = [(seconds(step), seconds(observe)) for _ in range(repeats)]
    return {
        "step": statistics.median(a for a, _ in pairs),
        "observation": statistics.median(b for _, b in pairs),
        "cost": statistics.median(b / (interval * a) for a, b in pairs),
    }


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--interval", type=int, default=undrop.Watcher().interval)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs = {name: cost(name, arguments.interval, arguments.repeats) for name in CASES}
    for name, figures in costs.items():
        print(
            f"{name:10s} step {figures['step']:.4f} s, observation {figures['observation']:.4f} s: "
            f"{figures['cost']:.1%} at an interval of {arguments.interval}"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(costs, indent=2) + "\n")


if __name__ == "__main__":
    main()
