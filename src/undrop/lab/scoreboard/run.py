"""One training of the scoreboard: a task, a method with its options, and a seed."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undrop.engines.antithetic import Antithetic
from undrop.lab.reproduce.worker import commit, single_threaded
from undrop.lab.scoreboard.data import Data, batches
from undrop.lab.scoreboard.tasks import TASKS, Task
from undrop.lab.train.environment import machine, versions
from undrop.losses import Loss
from undrop.objectives import Analytic, Dropout
from undrop.tuning import Tuner

_EVALUATIONS = 8  # of the validation and the test part during a run

Backward = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Spec:
    """Everything that affects the result of a run."""

    task: str  # its name
    kind: str  # "none", "dropout", "analytic", "tuner", or "analytic:ε₀" with another ε₀
    p: float  # the drop probability of the model's dropouts
    decay: float  # the weight decay
    seed: int  # of the data, the weights and the noise
    epochs: int

    @property
    def key(self) -> str:
        """The hash of the run."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def execute(spec: Spec, root: str) -> dict[str, Any]:
    """Train, and return the record: losses at the epoch with the best validation, and seconds."""
    single_threaded()
    task = TASKS[spec.task]
    data = task.data(Path(root), spec.seed)
    torch.manual_seed(1_000 + spec.seed)
    model = task.model(Path(root), 0.0 if spec.kind == "none" else spec.p).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=task.lr, weight_decay=spec.decay)
    backward = _backward(spec, task, model, task.loss(), data)
    curve, seconds, steps = _train(spec, task, model, optimizer, backward, data)
    best = min(curve, default=[math.inf, math.inf])
    return {
        "spec": asdict(spec),
        "validation": best[0],
        "test": best[1],
        "steps": steps,
        "seconds": round(seconds, 3),
        "versions": versions(),
        "machine": machine(torch.device("cpu")),
        "commit": commit(),
    }


def _train(
    spec: Spec,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Backward,
    data: Data,
) -> tuple[list[list[float]], float, int]:
    """Return [validation, test] at each evaluation, processor seconds of training, and steps."""
    order = torch.Generator().manual_seed(spec.seed)
    per_epoch = 1 if data.whole else data.train[0].shape[data.dim] // task.batch
    total, step, seconds, curve = per_epoch * spec.epochs, 0, 0.0, []
    evaluated = {math.ceil(spec.epochs * (k + 1) / _EVALUATIONS) - 1 for k in range(_EVALUATIONS)}
    for epoch in range(spec.epochs):
        began = time.process_time()
        for inputs, targets in batches(data, "train", task.batch, order):
            falling = 0.5 * (1.0 + math.cos(math.pi * step / total))
            optimizer.param_groups[0]["lr"] = task.lr * falling
            optimizer.zero_grad()
            backward(inputs, targets)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
        seconds += time.process_time() - began
        if epoch in evaluated:
            losses = [_evaluate(model, task.loss(), data, part) for part in ("validation", "test")]
            if not math.isfinite(losses[0]):
                break
            curve.append(losses)
    return curve, seconds, step


def _evaluate(model: nn.Module, loss: Loss, data: Data, part: str) -> float:
    """The mean loss on a part, without dropout."""
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for inputs, targets in batches(data, part, 200, None):
            rows = float((targets != -100).sum())
            total += float(loss.value(_logits(model(inputs)), targets)) * rows
            count += rows
    model.train()
    return total / count


def _logits(output: Any) -> Tensor:
    logits: Tensor = output[0] if isinstance(output, tuple) else output
    return logits


def _backward(spec: Spec, task: Task, model: nn.Module, loss: Loss, data: Data) -> Backward:
    """Return the function that computes the gradients of a batch."""
    if spec.kind in ("none", "dropout"):  # PyTorch's own step, which others are compared with

        def plain(inputs: Tensor, targets: Tensor) -> None:
            loss.value(_logits(model(inputs)), targets).backward()

        return plain
    if spec.kind == "tuner":
        shuffled = torch.Generator().manual_seed(spec.seed)
        held = batches(data, "validation", task.batch, shuffled)
        step: Callable[..., Any] = Tuner(Dropout(loss=loss), held).step
    else:
        epsilon = spec.kind.partition(":")[2]
        engine = Antithetic(float(epsilon)) if epsilon else "auto"
        step = Analytic(loss=loss, engine=engine, fraction=task.fraction, batch_dim=data.dim)

    def regularized(inputs: Tensor, targets: Tensor) -> None:
        step(model, inputs, targets).backward()

    return regularized
