"""Compare the formulas of docs/scaling.md with measured steps, at three sizes.

    python benchmarks/scaling.py        # a few minutes on one core

For each engine it measures, relative to a plain dropout step with the same fused output layer:

- arithmetic, by torch's FLOP counter;
- activations, the bytes that autograd saves for the backward pass, without the parameters;
- the peak of the memory that torch allocates within a step, including gradients;
- processor time on one thread, in turns, so that other work on the machine affects all alike.

Only the last depends on the machine. The script prints the table of the page and writes
docs/figures/scaling.json.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import undrop
from undrop.lab.models import GPT

SIZES = ((128, 2), (256, 4), (384, 6))  # width and layers
VOCABULARY, LENGTH, BATCH, ROUNDS = 2000, 128, 8, 7
OUT = Path(__file__).parents[1] / "docs" / "figures" / "scaling.json"
Step = Callable[[], undrop.Step]
Figures = dict[str, float]


class Method(NamedTuple):
    """An objective, and the page's formulas for its arithmetic and its saved activations."""

    make: Callable[..., undrop.Objective]
    flops: float
    activations: float
    bound: str = ""  # "" if the formula is exact, or "≤ " or "≥ "


def _analytic(engine: str, **options: object) -> Callable[..., undrop.Objective]:
    return partial(undrop.Analytic, engine=engine, batch_dim=1, **options)


METHODS = {
    "dropout": Method(undrop.Dropout, 1, 1),
    "tangent": Method(_analytic("tangent"), 2, 2),
    "antithetic": Method(_analytic("antithetic"), 2, 2),
    "antithetic, ρ = ¼": Method(_analytic("antithetic", fraction=0.25), 1.25, 1.25),
    "reverse, explicit": Method(_analytic("reverse", implicit=False), 2, 2, "≥ "),
    "reverse, both": Method(_analytic("reverse"), 3, 3, "≥ "),
}


class SavedTensors:
    """Counts the bytes of all tensors that autograd saves, each storage once, without the parameters."""

    def __init__(self, model: nn.Module) -> None:
        persistent = [*model.parameters(), *model.buffers()]
        self._persistent = {t.untyped_storage().data_ptr() for t in persistent}
        self.storages: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor, and keep it, so that no other tensor gets its address."""
        if tensor._is_zerotensor():  # a zero tangent takes no memory
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._persistent:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def peak_memory(step: Step) -> float:
    """Return the peak of the bytes that torch allocates during a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step().backward()
    events = profiled.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = highest = 0
    for _, change in sorted(changes, key=lambda event: event[0]):
        now += change
        highest = max(highest, now)
    return float(highest)


def count_step(model: nn.Module, step: Step) -> Figures:
    """Return the figures that do not depend on the machine."""
    step().backward()  # warm up: the first step finds the sites
    with Flops() as counter:
        step().backward()
    saved = SavedTensors(model)
    with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        result = step()
    result.backward()
    del result
    return {
        "flops": float(counter.total),
        "held": float(sum(saved.storages.values())),
        "peak": peak_memory(step),
    }


class Flops(TorchDispatchMode):
    """Counts FLOPs by torch's formulas, without the hooks on modules that torch's own counter needs."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call the function, and add its FLOPs."""
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def time_step(step: Step) -> float:
    """Return the processor time of one step."""
    gc.collect()
    start = time.process_time()
    step().backward()
    return time.process_time() - start


def measure_model(width: int, layers: int) -> dict[str, Figures]:
    """Return all figures of all methods on one model."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, size=width, layers=layers, heads=4, context=LENGTH, dropout=0.1)
    x, y = torch.randint(VOCABULARY, (2, LENGTH, BATCH))
    parameters = sum(p.numel() for p in model.parameters())

    def step(objective: undrop.Objective) -> undrop.Step:
        model.zero_grad()
        return objective(model, {"tokens": x, "logits": False}, y)

    steps = {name: partial(step, m.make(loss=model.loss())) for name, m in METHODS.items()}
    found = {name: count_step(model, step) for name, step in steps.items()}
    rounds = [{name: time_step(step) for name, step in steps.items()} for _ in range(ROUNDS)]
    for name, figures in found.items():
        ratios = (turn[name] / turn["dropout"] for turn in rounds)
        figures["time"] = statistics.median(ratios)
        figures["parameters"] = parameters
    return found


def row(name: str, sizes: list[dict[str, Figures]]) -> str:
    """Return a line of the page's table: the formulas, and the figures at the three sizes."""
    method = METHODS[name]

    def found(key: str) -> str:
        return ", ".join(f"{size[name][key] / size['dropout'][key]:.2f}" for size in sizes)

    # The formula: all gradients, of four bytes per parameter, plus all activations.
    peaks = []
    for size in sizes:
        plain, gradients = size["dropout"]["held"], 4 * size["dropout"]["parameters"]
        peaks.append(f"{(gradients + method.activations * plain) / (gradients + plain):.2f}")
    cells = [
        name,
        f"{method.bound}{method.flops:g}",
        found("flops"),
        f"{method.bound}{method.activations:g}",
    ]
    times = ", ".join(f"{size[name]['time']:.2f}" for size in sizes)
    return " | ".join(
        ["", *cells, found("held"), ", ".join(peaks), found("peak"), times, ""]
    ).strip()


def main() -> None:
    """Measure, print, write."""
    torch.set_num_threads(1)
    sizes = [measure_model(width, layers) for width, layers in SIZES]
    print("parameters:", *(f"{size['dropout']['parameters']:,.0f}" for size in sizes))
    for name in METHODS:
        print(row(name, sizes))
    OUT.write_text(json.dumps(sizes, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
