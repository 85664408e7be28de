"""Probes: measurements on a trained model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from undrop.lab.corpora.batching import TrainingWindows
from undrop.lab.models import State, detach
from undrop.lab.train.runs import Run
from undrop.objectives import TAYLOR, Analytic, Dropout, NoRegularization
from undrop.registry import Registry

__all__ = ["PROBES", "taylor"]

PROBES: Registry[str, Callable[[Run], dict[str, float]]] = Registry("probe")
"""The probes by the name that a setting gives."""

_SAMPLES = 8
_WINDOWS = 40


@PROBES.register("taylor")
def taylor(run: Run) -> dict[str, float]:
    """Compare R_drop with the quadratic term of its Taylor expansion, on the training split.

    - ``dropped``: R_drop = E ℓ(F(x; 1, η)) - ℓ(F(x)), over masks;
    - ``quadratic``: ½ E[uᵀHu], R_approx with Taylor's factor;
    - ``taylor_share``: quadratic / dropped.

    Both are means over the first windows of the split, with several draws at each.
    """
    data = run.config.data
    loss = run.model.loss()
    plain, drop, quadratic = (
        NoRegularization(loss=loss),
        Dropout(_SAMPLES, loss=loss),
        Analytic(implicit=False, strength=TAYLOR, samples=_SAMPLES, loss=loss, batch_dim=1),
    )
    sums = {"plain": 0.0, "noisy": 0.0, "quadratic": 0.0}
    state: State | None = None
    run.model.train()
    with torch.random.fork_rng():
        torch.manual_seed(run.config.train.seed)
        windows = list(TrainingWindows(run.corpus.train, data.batch_size, data.length))[:_WINDOWS]
        for window in windows:
            inputs = {"tokens": window.inputs, "state": state, "logits": False}
            step = plain(run.model, inputs, window.targets)
            sums["plain"] += step.parts["loss"]
            sums["noisy"] += drop(run.model, inputs, window.targets).parts["loss"]
            sums["quadratic"] += quadratic(run.model, inputs, window.targets).parts["explicit"]
            state = detach(step.output[1])
    means = {name: value / len(windows) for name, value in sums.items()}
    dropped = means["noisy"] - means["plain"]
    return {
        "dropped": dropped,
        "quadratic": means["quadratic"],
        "taylor_share": means["quadratic"] / dropped,
    }
