"""Which part of dropout's explicit effect helps: the positive semi-definite part, or all of it?

    python benchmarks/explicit_parts.py --data FOLDER [--seeds 5] [--records FILE] [--write]

For every task of the scoreboard, with dropout's best p on it, this script measures the parts of R_drop:
½E[uᵀHu], which R_approx keeps; ½E[Dℓ·∂²F/∂ε²], which R_approx leaves out and which can be negative; and
the rest. Then it trains on three objectives: ℓ plus the first part, ℓ plus the first two parts, and the
mean loss over 8 masks, which contains all parts. ``--write`` puts the table into docs/reproducing.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import undrop
from undrop.engines import Draw, Evaluation
from undrop.engines.draw import ScaledNoise
from undrop.intercept import Batch, no_noise
from undrop.lab.reproduce.results import mean_interval
from undrop.lab.reproduce.worker import use_one_thread
from undrop.lab.scoreboard import board as training
from undrop.lab.scoreboard.board import TaskRuns, read_records
from undrop.lab.scoreboard.data import batches
from undrop.lab.scoreboard.tasks import TASKS
from undrop.objectives import Dropout, Objective

EPSILON = 0.25
PAGE = Path("docs/reproducing.md")
MARKS = "<!-- explicit parts: begin -->", "<!-- explicit parts: end -->"
METHODS = ("dropout", "quadratic", "second order", "all")


class SecondOrder(Objective):
    """ℓ + ½·d²ℓ/dε², both second-order terms, from the losses of three passes with the same η."""

    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield ℓ₀ + (ℓ₊ + ℓ₋ - 2ℓ₀)/2ε²."""
        draw = Draw("sign", "as-declared", self.selection, self.generators)
        output, at_zero = self.forward_and_loss(batch, no_noise)
        up, down = (
            self.forward_and_loss(batch, ScaledNoise(draw, epsilon))[1]
            for epsilon in (EPSILON, -EPSILON)
        )
        explicit = (up + down - 2.0 * at_zero) * (0.5 / EPSILON**2)
        parts = {"loss": at_zero.detach(), "explicit": explicit.detach()}
        yield Evaluation(at_zero + explicit, parts, lambda: output, last=True)


def objective(method: str, task: Any) -> Objective:
    """Return the objective of a method."""
    loss = task.loss()
    if method == "dropout":
        return Dropout(loss=loss)
    if method == "quadratic":
        return undrop.Analytic(loss=loss, strength=0.5, implicit=False)
    return SecondOrder(loss=loss) if method == "second order" else Dropout(k=8, loss=loss)


def train_and_measure(spec: training.Spec, method: str, root: Path) -> dict[str, Any]:
    """Train, and return the test loss; for dropout also the parts of R_drop on the training data."""
    task = TASKS[spec.task]
    data = task.data(root, spec.seed)
    torch.manual_seed(1_000 + spec.seed)
    model = task.model(root, spec.p).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=task.lr)
    curve, _, _ = training.train(spec, model, optimizer, objective(method, task), data)
    record = {"task": spec.task, "seed": spec.seed, "method": method, "p": spec.p}
    record["test"] = min(curve)[1] if curve else float("inf")
    if method == "dropout":
        record |= _parts_of_r_drop(model, task, data)
    return record


def _parts_of_r_drop(model: nn.Module, task: Any, data: Any) -> dict[str, float]:
    some = [
        pair for _, pair in zip(range(4), batches(data, "train", task.batch, None), strict=False)
    ]
    found = undrop.diagnose(
        model,
        some,
        loss=task.loss(),
        implicit=False,
        draws=24,
        seconds=30.0,
        batch_dim=data.batch_dim,
        generator=torch.Generator().manual_seed(0),
        progress=False,
    ).explicit.parts
    return {name: estimate.value for name, estimate in found._asdict().items()}


def measure(root: Path, results: Path, records: Path, seeds: int) -> None:
    """Make the runs that have no record yet."""
    use_one_thread()
    known = read_file(records)
    done = {(r["task"], r["seed"], r["method"]) for r in known}
    board = read_records(results)
    records.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(1, seeds + 1):
        for task in TASKS:
            chosen = TaskRuns(task, board, 1).chosen_spec("dropout", equal_time=False)
            assert chosen is not None, "run `undrop reproduce scoreboard` first"
            for method in METHODS:
                if (task, seed, method) in done:
                    continue
                spec = training.Spec(task, "dropout", chosen.p, 0.0, seed, chosen.epochs)
                record = train_and_measure(spec, method, root)
                with records.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(record, flush=True)


def read_file(records: Path) -> list[dict[str, Any]]:
    """Read the records of a file, if it exists."""
    return [json.loads(x) for x in records.read_text().splitlines()] if records.exists() else []


def table(records: list[dict[str, Any]]) -> str:
    """Return the table: the shares of the parts of R_drop, and the test losses minus dropout's."""
    lines = [
        "| task | ½E[uᵀHu] | curvature | rest | ½E[uᵀHu] alone | with the curvature | all, 8 masks |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in TASKS:
        mine = [r for r in records if r["task"] == name]
        tests = {m: {r["seed"]: r["test"] for r in mine if r["method"] == m} for m in METHODS}
        seeds = sorted(set.intersection(*(set(t) for t in tests.values())))
        if not seeds:
            continue
        shares = [_share(mine, part, seeds) for part in ("half_quadratic", "curvature", "rest")]
        changes = [
            _interval([tests[m][s] - tests["dropout"][s] for s in seeds], "{:+.3f}")
            for m in METHODS[1:]
        ]
        lines.append(f"| {TASKS[name].label} | {' | '.join(shares + changes)} |")
    return "\n".join(lines)


def _share(records: list[dict[str, Any]], part: str, seeds: list[int]) -> str:
    """Return a part as a share of R_drop: the ratio of their means over seeds."""
    runs = [r for r in records if r["method"] == "dropout" and r["seed"] in seeds]
    return f"{sum(r[part] for r in runs) / sum(r['r_drop'] for r in runs):.0%}".replace("%", " %")


def _interval(values: list[float], form: str) -> str:
    found = mean_interval(values)
    return f"{form} ({form} – {form})".format(found.estimate, found.low, found.high)


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=Path("results/scoreboard"))
    parser.add_argument("--records", type=Path, default=Path("results/scoreboard/parts.jsonl"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    measure(options.data, options.results, options.records, options.seeds)
    text = table(read_file(options.records))
    print(text)
    if options.write:
        before, rest = PAGE.read_text().split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        PAGE.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
