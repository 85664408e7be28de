"""Compare midpoint branches with plain ±ε₀ in the training of ReLU networks.

By default, the rows +ε₀ and -ε₀ of a stacked pass take the branch of their midpoint at every kink, so
the gradient equals that of the tangent engine. With plain ±ε₀, each row takes its own branch, and u also
contains the changes of slope at the kinks, smoothed over ε₀. This script trains the same network both
ways on 300 handwritten digits with the same seeds, and prints the test loss and error with paired
differences.

    python benchmarks/midpoints.py
"""

from __future__ import annotations

import math
import statistics
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import undrop
from undrop.engines import Antithetic
from undrop.engines.proving import Prover
from undrop.lab.models import MLP

EPOCHS, BATCH, TRAINING_DIGITS = 60, 30, 300


def train(seed: int, epsilon: float, *, midpoints: bool) -> tuple[float, float]:
    """Train; return the loss, and the error in %, on the digits that are not trained on."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train_rows, test_rows = order[:TRAINING_DIGITS], order[TRAINING_DIGITS:]
    torch.manual_seed(seed)
    model = MLP((64, 64, 64, 10), dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    objective = undrop.Analytic(engine=Antithetic(epsilon), strength=undrop.TAYLOR)
    midpoints_agree = Prover._midpoints_agree
    if not midpoints:
        Prover._midpoints_agree = lambda *_: False  # type: ignore[method-assign]
    try:
        for _ in range(EPOCHS):
            for rows in train_rows[torch.randperm(TRAINING_DIGITS)].split(BATCH):
                optimizer.zero_grad()
                objective(model, x[rows], y[rows]).backward()
                optimizer.step()
    finally:
        Prover._midpoints_agree = midpoints_agree  # type: ignore[method-assign]
    model.eval()
    with torch.no_grad():
        logits = model(x[test_rows])
    wrong = logits.argmax(1) != y[test_rows]
    return float(F.cross_entropy(logits, y[test_rows])), 100.0 * float(wrong.float().mean())


def main(seeds: int = 10) -> None:
    """Print means, and the paired difference plain - midpoint with its standard error."""
    for epsilon in (0.05, 0.25):
        rows = [
            [train(seed, epsilon, midpoints=on) for seed in range(seeds)] for on in (True, False)
        ]
        for i, measure in enumerate(("loss", "error %")):
            middle, plain = ([run[i] for run in runs] for runs in rows)
            paired = [b - a for a, b in zip(middle, plain, strict=True)]
            error = statistics.stdev(paired) / math.sqrt(seeds)
            print(
                f"ε₀ = {epsilon:<5} {measure:<8} midpoint {statistics.mean(middle):.4f}  "
                f"plain {statistics.mean(plain):.4f}  difference {statistics.mean(paired):+.4f} "
                f"± {error:.4f}"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*(int(a) for a in sys.argv[1:]))
