"""The analytic terms of a batch, alone: strength·uᵀHu or ∂ℓ/∂ε without the loss itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from undrop.engines import Draw, Engine, Request, as_engine
from undrop.intercept import Batch, Selection, keep_statistics
from undrop.losses import Coefficients, Loss

Generator = Callable[[torch.device], torch.Generator]


@dataclass(frozen=True)
class AnalyticNoise:
    """How the noise of the analytic terms is made: by which engine, at which sites, how shared."""

    engine: Engine = field(default_factory=lambda: as_engine("auto"))
    mask: str = "as-declared"
    selection: Selection = field(default_factory=Selection)
    fraction: float = 1.0
    batch_dim: int | None = None


def analytic_term(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss: Loss,
    generator: Generator,
    noise: AnalyticNoise,
    *,
    explicit: float = 0.0,
    implicit: float = 0.0,
) -> Tensor:
    """explicit·uᵀHu + implicit·∂ℓ/∂ε for one draw of η, with a graph; keeps running statistics.

    Args:
        model: in train mode.
        inputs: as for an objective.
        targets: as for an objective.
        loss: the loss.
        generator: gives the random generator for a device.
        noise: how the noise is made.
        explicit: the factor of uᵀHu.
        implicit: the factor of ∂ℓ/∂ε.
    """
    request = Request(
        batch=Batch(model, inputs, targets),
        loss=loss,
        draw=Draw("sign", noise.mask, noise.selection, generator),
        coefficients=Coefficients(loss=0.0, quadratic=explicit, directional=implicit),
        fraction=noise.fraction,
        batch_dim=noise.batch_dim,
    )
    with keep_statistics(model):
        return noise.engine.evaluate(request).total


def gradient(scalar: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradient in the parameters; zeros for those that the scalar does not depend on."""
    if not scalar.requires_grad:  # such as uᵀHu of a loss that is linear in the output
        return [torch.zeros_like(p) for p in parameters]
    return list(torch.autograd.grad(scalar, parameters, allow_unused=True, materialize_grads=True))
