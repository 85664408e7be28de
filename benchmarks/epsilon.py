"""The error of the antithetic engine's derivative as a function of ε₀, in each precision.

The engine's default ε₀ was chosen from this curve, which docs/engines.md shows. The truncation error
is proportional to ε₀²; the rounding error is proportional to 1/ε₀ and grows with lower precision.

    python benchmarks/epsilon.py docs/figures/epsilon.png
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrop
from undrop.engines import Antithetic, Draw, Request
from undrop.intercept import Batch, Selection
from undrop.lab.models import AWDLSTM, GPT
from undrop.losses import Coefficients

EPSILONS = [10 ** (-e / 4) for e in range(0, 17)]
VOCABULARY = 500


def problems() -> dict[str, Callable[[], nn.Module]]:
    """Return the models, with usual drop probabilities."""
    return {
        "LSTM, q = 0.4": lambda: AWDLSTM(VOCABULARY, embedding_size=100, hidden_size=100, layers=2),
        "transformer, q = 0.1": lambda: GPT(VOCABULARY, size=64, layers=2, heads=4, context=32),
    }


def gradient(engine: Any, model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of both regularizers for one fixed η."""
    generator = torch.Generator().manual_seed(7)
    request = Request(
        batch=Batch(model, x, y, loss=undrop.CrossEntropy()),
        draw=Draw("sign", "as-declared", Selection(), lambda device: generator),
        coefficients=Coefficients(0.0, 1.0, 1.0),
        batch_dim=1,
    )
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        evaluation = engine.evaluate(request)
    evaluation.total.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([g.flatten().double() for g in grads])


def curve(make: Callable[[], nn.Module], dtype: torch.dtype) -> list[float]:
    """Return the relative error of the gradient for every ε₀.

    The reference is ε₀ = 1e-4 in float64 with the same η, whose error is about 1e-8. The tests compare
    the antithetic engine with the tangent engine.
    """
    torch.manual_seed(0)
    model = make().double()
    x = torch.randint(VOCABULARY, (32, 8))
    y = torch.randint(VOCABULARY, (32, 8))
    truth = gradient(Antithetic(1e-4), model, x, y, torch.float64)
    model = model.to(torch.float32 if dtype is torch.bfloat16 else dtype)
    return [
        float((gradient(Antithetic(e), model, x, y, dtype) - truth).norm() / truth.norm())
        for e in EPSILONS
    ]


def main(path: Path) -> None:
    """Measure, print and draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(problems()), sharey=True)
    styles = {torch.float64: "k-o", torch.float32: "k--s", torch.bfloat16: "k:^"}
    for axes, (name, make) in zip(panels, problems().items(), strict=True):
        for dtype, style in styles.items():
            errors = curve(make, dtype)
            label = str(dtype).removeprefix("torch.")
            print(
                f"{name:22} {label:9}",
                " ".join(f"{e:.3f}:{r:.1e}" for e, r in zip(EPSILONS, errors, strict=True)),
            )
            axes.loglog(EPSILONS, errors, style, markersize=4, label=label)
        axes.axvline(undrop.engines.antithetic.EPSILON, color="0.6", linewidth=1)
        axes.set_title(name)
        axes.set_xlabel("ε₀")
    panels[0].set_ylabel("relative error of the gradient")
    panels[0].legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "epsilon.png"))
