"""Other scores for the cases of tuning_benefit.py: a benefit over a horizon, and branches; see `--help`.

For each task, p and seed the model is trained with p at every site. At its last weights W, with
v = ∇L_val:

- `one`: z of the slope of r_i along v, by differences over 1 % of ‖W‖;
- `horizon`: the same along (H + μ)⁻¹v, with H the Hessian of the training loss and μ that of 100 steps
  of the optimizer: √(second moment)/(100 lr) for Adam, max(1, ‖g‖/clip)/(100 lr) for clipped SGD;
- `branch`: L_val after 20 steps without the site minus with it, at half the learning rate, twice.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tuning_benefit import CASES, SEEDS
from tuning_tasks import TASKS, Batch, Data, Task, batches

import undrop
from tuning import Records, dropout_slots, plain, train
from undrop.diagnosis.measure.benefit import inner, validation_gradient
from undrop.engines import Draw, ZeroLeaves
from undrop.intercept import Interception, Selection, call, logits_of

BATCHES, STRIDE, HORIZON = 12, 0.01, 100
ITERATIONS = 12
"""Of conjugate gradients."""
Tensors = list[Tensor]


class Subject:
    """A trained model with its optimizer, its weights and its batches."""

    def __init__(self, task: Task, data: Data, model: nn.Module, optimizer: Optimizer) -> None:
        self.task, self.model, self.optimizer = task, model.train(), optimizer
        self.loss, self.slots = task.loss(), dropout_slots(model)
        self.weights = list(model.parameters())
        self.at = [w.detach().clone() for w in self.weights]
        order = torch.Generator().manual_seed(1)
        self.held = list(batches(data, "validation", task.batch, order))[:BATCHES]
        self.own = list(batches(data, "train", task.batch, order))
        self.again = list(batches(data, "train", task.batch, order))
        self.scale = STRIDE * math.sqrt(inner(self.at, self.at))

    def put(self, direction: Sequence[Tensor] | None = None, by: float = 0.0) -> None:
        """Set the weights to W + by · direction."""
        with torch.no_grad():
            for i, (weight, value) in enumerate(zip(self.weights, self.at, strict=True)):
                weight.copy_(value if direction is None else value + by * direction[i])

    def gradient(self, found: Sequence[Batch]) -> Tensors:
        """The mean gradient without dropout, at the weights as they are."""
        every = [validation_gradient(self.model, x, y, self.loss, self.weights) for x, y in found]
        return [torch.stack(parts).mean(0) for parts in zip(*every, strict=True)]

    def sizes(self, batch: Batch, seed: int) -> dict[str, float]:
        """r_i of every site, for one ξ: the squared gradients of ⟨H^½ξ, F⟩ in the sites' noise."""
        field = ZeroLeaves(Draw("sign", "as-declared", Selection(), _no_draw))
        with Interception(self.model, field):
            output = logits_of(call(self.model, batch[0]))
        random = torch.Generator().manual_seed(seed)
        xi = torch.empty_like(output).bernoulli_(0.5, generator=random).mul_(2.0).sub_(1.0)
        root = math.sqrt(2.0) * xi
        if not isinstance(self.loss, undrop.MSE):
            p = torch.softmax(output.detach(), -1)
            root = p.sqrt() * xi
            root = root - p * root.sum(-1, keepdim=True)
        found = torch.autograd.grad(output, field.leaves, root)
        count = float(self.loss.count(output, batch[1]))
        return {
            s.name: float(g.double().square().sum()) / count
            for s, g in zip(field.sites, found, strict=True)
        }

    def slopes(self, direction: Tensors) -> dict[str, float]:
        """z of the slope of every r_i along a direction."""
        by = self.scale / math.sqrt(inner(direction, direction))
        found: dict[str, list[float]] = {}
        for seed, batch in enumerate(self.own[:BATCHES]):
            sides = []
            for sign in (1.0, -1.0):
                self.put(direction, sign * by)
                sides.append(self.sizes(batch, seed))
            for name in sides[0]:
                found.setdefault(name, []).append((sides[0][name] - sides[1][name]) / (2.0 * by))
        self.put()
        return {n: float(np.mean(x) / np.std(x, ddof=1) * len(x) ** 0.5) for n, x in found.items()}

    def damping(self) -> Tensors:
        """μ, element by element."""
        reach = self.task.lr * HORIZON
        if not self.task.sgd:
            moments = [self.optimizer.state[w]["exp_avg_sq"] for w in self.weights]
            return [(m.sqrt() + 1e-8) / reach for m in moments]
        norms = [math.sqrt(inner(g, g)) for g in (self.gradient([b]) for b in self.own[:4])]
        factor = max(1.0, sum(norms) / len(norms) / self.task.clip)
        return [torch.full_like(w, factor / reach) for w in self.at]

    def curved(self, direction: Tensors, damping: Tensors) -> Tensors:
        """(H + μ) · direction, by differences of gradients."""
        by = self.scale / math.sqrt(inner(direction, direction))
        sides = []
        for sign in (1.0, -1.0):
            self.put(direction, sign * by)
            sides.append(self.gradient(self.own[: BATCHES // 2]))
        self.put()
        parts = zip(*sides, direction, damping, strict=True)
        return [(up - down) / (2.0 * by) + mu * d for up, down, d, mu in parts]

    def branch(self, site: int, p: float, repeat: int, without: bool) -> float:
        """L_val after 20 steps with p at every site, or without one of them."""
        self.put()
        saved = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.param_groups[0]["lr"] = 0.5 * self.task.lr
        for i, (module, name) in enumerate(self.slots):
            setattr(module, name, 0.0 if without and i == site else p)
        torch.manual_seed(5 + repeat)
        step, _ = plain(self.model, self.loss, self.optimizer, None, 0)
        for x, y in (self.again * 20)[20 * repeat : 20 * repeat + 20]:
            self.optimizer.zero_grad()
            step(x, y)
            nn.utils.clip_grad_norm_(self.weights, self.task.clip)
            self.optimizer.step()
        self.optimizer.load_state_dict(saved)
        self.model.eval()
        with torch.no_grad():
            losses = [self.loss.value(logits_of(self.model(x)), y) for x, y in self.held]
        self.model.train()
        return float(torch.stack(losses).mean())


def _no_draw(device: torch.device) -> torch.Generator:
    raise AssertionError("zero leaves draw nothing")


def solved(apply: Callable[[Tensors], Tensors], right: Tensors, damping: Tensors) -> Tensors:
    """Conjugate gradients, preconditioned by μ, up to a direction of negative curvature."""
    x = [torch.zeros_like(b) for b in right]
    rest = right
    ahead = [r / mu for r, mu in zip(rest, damping, strict=True)]
    size = first = inner(rest, ahead)
    for _ in range(ITERATIONS):
        image = apply(ahead)
        curvature = inner(ahead, image)
        if curvature <= 0.0:
            break
        x = [a + size / curvature * d for a, d in zip(x, ahead, strict=True)]
        rest = [r - size / curvature * i for r, i in zip(rest, image, strict=True)]
        scaled = [r / mu for r, mu in zip(rest, damping, strict=True)]
        before, size = size, inner(rest, scaled)
        if size < 1e-6 * first:
            break
        ahead = [s + size / before * d for s, d in zip(scaled, ahead, strict=True)]
    return x if inner(x, x) > 0.0 else ahead


def scores(subject: Subject, p: float) -> dict[str, Any]:
    """All three, by site."""
    gradient, damping = subject.gradient(subject.held), subject.damping()
    far = solved(lambda d: subject.curved(d, damping), gradient, damping)
    one, horizon = subject.slopes(gradient), subject.slopes(far)
    branch = {
        name: [
            subject.branch(i, p, repeat, True) - subject.branch(i, p, repeat, False)
            for repeat in (0, 1)
        ]
        for i, name in enumerate(one)
    }
    return {"one": one, "horizon": horizon, "branch": branch}


def main() -> None:
    """Run what has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpora")
    parser.add_argument("--records", type=Path, default=Path("results/tuning/horizon.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = Records(options.records)
    groups = sorted({(case["task"], case["p"]) for case in json.loads(CASES.read_text())})
    for seed, (name, p) in product(SEEDS, groups):
        key = {"task": name, "p": p, "seed": seed}
        if records.find(**key):
            continue
        task, kept = TASKS[name], []
        data = task.data(options.data, seed)

        def method(model: nn.Module, loss: undrop.Loss, optimizer: Any, *rest: Any, into=kept):
            into.append((model, optimizer))
            return plain(model, loss, optimizer, *rest)

        train(task, data, seed, {"start": p}, method)
        records.add({**key, **scores(Subject(task, data, *kept[0]), p)})
        print(key, flush=True)


if __name__ == "__main__":
    main()
