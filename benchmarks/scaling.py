"""What docs/scaling.md claims, counted: arithmetic, activations held, and time, at three sizes.

    python docs/figures/scaling.py        # a few minutes on one core

Arithmetic is counted by torch's FLOP counter, activations as the bytes that autograd holds between
forward and backward pass (parameters aside); neither depends on the machine. Time is processor time on
one thread. Prints a table and writes scaling.json beside itself.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import undrop
from undrop.nn import GPT

SIZES = {"0.7 M": (128, 2), "4 M": (256, 4), "12 M": (384, 6)}  # width and layers
VOCABULARY, LENGTH, BATCH, ROUNDS = 2000, 128, 8, 3
METHODS: dict[str, Callable[..., undrop.Objective]] = {
    "dropout": undrop.Dropout,
    "tangent": lambda **options: undrop.Analytic(engine="tangent", batch_dim=1, **options),
    "antithetic": lambda **options: undrop.Analytic(engine="antithetic", batch_dim=1, **options),
    "tangent, ρ = ¼": lambda **options: undrop.Analytic(
        engine="tangent", fraction=0.25, batch_dim=1, **options
    ),
    "antithetic, ρ = ¼": lambda **options: undrop.Analytic(
        engine="antithetic", fraction=0.25, batch_dim=1, **options
    ),
    "reverse, explicit": lambda **options: undrop.Analytic(
        engine="reverse", implicit=False, batch_dim=1, **options
    ),
    "reverse, both": lambda **options: undrop.Analytic(engine="reverse", batch_dim=1, **options),
}


class Held:
    """The bytes of all tensors that autograd saves within, each storage once, parameters aside."""

    def __init__(self, model: nn.Module) -> None:
        known = [*model.parameters(), *model.buffers()]
        self._known = {t.untyped_storage().data_ptr() for t in known}
        self.storages: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Count it, and keep it, so that its place in memory is not used again."""
        if tensor._is_zerotensor():  # the tangent of what does not move: it takes no memory
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def measured(model: GPT, objective: undrop.Objective, x: Tensor, y: Tensor) -> dict[str, float]:
    """FLOPs, bytes held and seconds of one step."""
    inputs = {"tokens": x, "logits": False}

    def step() -> undrop.Step:
        model.zero_grad()
        return objective(model, inputs, y)

    step().backward()  # the sites are looked up in the first step
    with FlopCounterMode(display=False) as counter:
        step().backward()
    held = Held(model)
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda tensor: tensor):
        taken = step()
    taken.backward()
    times = []
    for _ in range(ROUNDS):
        gc.collect()
        start = time.process_time()
        step().backward()
        times.append(time.process_time() - start)
    return {
        "flops": float(counter.get_total_flops()),
        "bytes": float(sum(held.storages.values())),
        "seconds": statistics.median(times),
    }


def main() -> None:
    """Count, print, write."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for title, (width, layers) in SIZES.items():
        torch.manual_seed(0)
        model = GPT(VOCABULARY, size=width, layers=layers, heads=4, context=LENGTH, dropout=0.1)
        x, y = torch.randint(VOCABULARY, (2, LENGTH, BATCH))
        found[title] = {"parameters": sum(p.numel() for p in model.parameters())}
        for name, make in METHODS.items():
            found[title][name] = measured(model, make(loss=model.loss()), x, y)
        plain = found[title]["dropout"]
        print(f"{title}: {found[title]['parameters']:,} parameters")
        for name in METHODS:
            row = found[title][name]
            ratios = (row[key] / plain[key] for key in ("flops", "bytes", "seconds"))
            print(f"  {name:20} " + "  ".join(f"{ratio:6.2f}" for ratio in ratios))
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
