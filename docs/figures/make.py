"""The figures of docs/dropout.md, from two small networks: a classifier and a language model.

    python docs/figures/make.py            # measure and draw: a minute and a half on one core
    python docs/figures/make.py --draw     # draw again from numbers.json

Writes explicit.png, implicit.png and numbers.json beside itself. Every curve has its own marker and
dash, so it is recognizable without color.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import undrop

HERE = Path(__file__).parent
KS = (1, 2, 4, 8)
OWN_Q = {"classifier of digits": 0.5, "LSTM language model": 0.4}
"""The drop probability that each network is trained with."""
LANGUAGE_MODEL = {
    "model": {
        **{"name": "awd-lstm", "embedding_size": 100, "hidden_size": 100, "layers": 2},
        **{"input_dropout": 0.4, "hidden_dropout": 0.4, "output_dropout": 0.4},
        "weight_dropout": 0.0,
    },
    "data": {"name": "pydocs", "batch_size": 20, "length": 35},
    "objective": {"name": "dropout"},
    "optimizer": {"name": "sgd", "lr": 10.0, "clip": 0.35},
    "schedule": {"name": "cosine"},
    "train": {"epochs": 4, "threads": 1, "test": "end"},
}


@dataclass(frozen=True)
class Subject:
    """A trained model with batches, all of them and one small one."""

    title: str
    model: nn.Module
    loss: undrop.Loss
    batches: list[tuple[Any, Tensor]]
    one: tuple[Any, Tensor]
    repeats: int


def classifier() -> Subject:
    """Two hidden layers on scikit-learn's digits after 20 epochs of plain dropout."""
    from sklearn.datasets import load_digits

    from undrop.lab.models import MLP

    rows, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(rows, dtype=torch.float32) / 16.0 - 0.3, torch.tensor(labels)
    model = MLP((64, 64, 64, 10), dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    objective = undrop.Dropout()
    for _ in range(20):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            objective(model, x[rows], y[rows]).backward()
            optimizer.step()
    batches = list(zip(x.split(256), y.split(256), strict=True))
    loss = undrop.CrossEntropy()
    return Subject("classifier of digits", model, loss, batches, (x[:64], y[:64]), 200)


def language_model() -> Subject:
    """A two-layer LSTM on Python's manual after 4 epochs of plain dropout."""
    from undrop.lab.corpora.batching import TrainingWindows
    from undrop.lab.train import configure, run
    from undrop.lab.train.runs import open_run

    with tempfile.TemporaryDirectory() as folder:
        run(configure(None, LANGUAGE_MODEL), out=folder)
        opened = open_run(folder)
    model = opened.model.train()
    windows = list(TrainingWindows(opened.corpus.train, 20, 35))[:12]
    batches = [({"tokens": w.inputs, "logits": False}, w.targets) for w in windows]
    small = windows[0]
    one = ({"tokens": small.inputs[:, :8], "logits": False}, small.targets[:, :8])
    return Subject("LSTM language model", model, model.loss(), batches, one, 60)


def explicit(subject: Subject) -> dict[str, Any]:
    """E ℓ(dropout) - ℓ by Monte Carlo, and its second-order parts, for many q."""
    found = undrop.diagnose(
        subject.model,
        subject.batches,
        loss=subject.loss,
        implicit=False,
        seconds=20,
        draws=100,
        progress=False,
    ).explicit
    return {
        "q": [point.p for point in found.curve],
        "r_drop": [point.parts.r_drop._asdict() for point in found.curve],
        "psd": [point.parts.half_quadratic.value for point in found.curve],
        "psd_and_non_psd": [
            point.parts.half_quadratic.value + point.parts.curvature.value for point in found.curve
        ],
        "share_at_own_q": found.quadratic_share._asdict(),
    }


def draw_explicit(found: dict[str, Any], axes: Axes) -> None:
    """R_drop as measured and by second order, against q."""
    values = [value["value"] for value in found["r_drop"]]
    errors = [2.0 * (value["stderr"] or 0.0) for value in found["r_drop"]]
    axes.errorbar(found["q"], values, errors, fmt="k-o", capsize=3, label=r"$R_{drop}$, measured")
    axes.plot(found["q"], found["psd"], "k--s", fillstyle="none", label=r"$½E[u^T H u]$")
    label = r"$½E[u^T H u] + ½E[D\ell\cdot F'']$"
    axes.plot(found["q"], found["psd_and_non_psd"], "k:^", fillstyle="none", label=label)
    axes.set(xlabel="drop probability $q$", ylabel="rise of the mean loss", yscale="log")


def spread(objective: undrop.Objective, subject: Subject) -> float:
    """The trace of the covariance of the gradient over masks, on one batch."""
    samples = []
    for _ in range(subject.repeats):
        subject.model.zero_grad()
        objective(subject.model, *subject.one).backward()
        grads = [p.grad.flatten() for p in subject.model.parameters() if p.grad is not None]
        samples.append(torch.cat(grads))
    return float(torch.stack(samples).var(0).sum())


def implicit(subject: Subject) -> dict[str, Any]:
    """Gradient noise of Drop_k, alone and with noise added, relative to plain dropout's."""
    found: dict[str, Any] = {"k": list(KS)}
    for noise in (None, "resampled", "analytic"):
        values = [spread(undrop.Dropout(k, noise=noise, loss=subject.loss), subject) for k in KS]
        found[str(noise)] = [value / values[0] for value in values]
    return found


def draw_implicit(found: dict[str, Any], axes: Axes) -> None:
    """Gradient noise against k."""
    styles = {
        "None": (r"$Drop_k$", "k-o"),
        "resampled": (r"$Drop_k$ + resampled noise", "k--s"),
        "analytic": (r"$Drop_k$ + $\xi_{approx}$", "k:^"),
    }
    for noise, (label, style) in styles.items():
        axes.loglog(KS, found[noise], style, fillstyle="none", label=label)
    axes.set(xlabel="$k$, the number of masks", ylabel="gradient noise, dropout = 1")
    axes.set_xticks(KS, [str(k) for k in KS])
    axes.set_yticks(ticks := [0.125, 0.25, 0.5, 1.0], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def draw(numbers: dict[str, dict[str, Any]]) -> None:
    """One panel above the other: side by side they are too small for a phone."""
    for name, panel in {"explicit": draw_explicit, "implicit": draw_implicit}.items():
        figure = Figure(figsize=(5.6, 7.6), layout="constrained")
        panels = figure.subplots(len(numbers[name]), 1)
        for axes, (title, found) in zip(panels, numbers[name].items(), strict=True):
            panel(found, axes)
            axes.set_title(f"{title}, $q$ = {OWN_Q[title]}")
            if name == "explicit":
                axes.axvline(OWN_Q[title], color="0.7", linewidth=1)
        panels[0].legend()
        figure.savefig(HERE / f"{name}.png", dpi=130)


def main() -> None:
    """Train and measure, unless ``--draw`` is given; then draw."""
    path = HERE / "numbers.json"
    if "--draw" not in sys.argv:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        subjects = [classifier(), language_model()]
        numbers = {
            name: {subject.title: measure(subject) for subject in subjects}
            for name, measure in {"explicit": explicit, "implicit": implicit}.items()
        }
        path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    draw(json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
