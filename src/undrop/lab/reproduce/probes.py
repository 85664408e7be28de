"""Probes measure something on a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from undrop.diagnosis.measure.r_drop import measure_r_drop
from undrop.lab.corpora.batching import TrainingWindows
from undrop.lab.models import State, detach
from undrop.lab.train.runs import Run
from undrop.registry import Registry

PROBES: Registry[str, Callable[[Run], dict[str, float]]] = Registry("probe")
"""The probes by the name that a setting gives."""

_MASKS = 8
_WINDOWS = 40


@PROBES.register("taylor")
def taylor(run: Run) -> dict[str, float]:
    """Compare R_drop with the quadratic term of its Taylor expansion, on the training split.

    - ``dropped``: R_drop = E ℓ(F(x; 1, η)) - ℓ(F(x)), over masks;
    - ``quadratic``: ½ E[uᵀHu], R_approx with Taylor's factor;
    - ``taylor_share``: quadratic / dropped.

    Both are means over the first windows of the split, with the same masks.
    """
    device = next(run.model.parameters()).device
    found = measure_r_drop(
        run.model,
        _windows(run, device),
        loss=run.model.loss(),
        masks=_MASKS,
        generator=torch.Generator(device).manual_seed(run.config.train.seed),
    )
    return {
        "dropped": found.parts.r_drop.value,
        "quadratic": found.parts.half_quadratic.value,
        "taylor_share": found.quadratic_share.value,
    }


def _windows(run: Run, device: torch.device) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """The first windows, each with the state after the window before it, in eval mode."""
    state: State | None = None
    data = run.config.data
    for window in islice(TrainingWindows(run.corpus.train, data.batch_size, data.length), _WINDOWS):
        tokens, targets = window.inputs.to(device), window.targets.to(device)
        yield {"tokens": tokens, "state": state, "logits": False}, targets
        with torch.no_grad():
            state = detach(run.model(tokens, state, logits=False)[1])
