"""R_drop beside ½uᵀHu: the one estimator behind ``diagnose``, ``check`` and the Taylor probe.

    R_drop = E ℓ(F(x; 1, η)) - ℓ(F(x)) = ½E[uᵀHu] + ½E[Dℓ·∂²F/∂ε²] + rest

One mask η serves all parts: ℓ(F(x; 1, η)) - ℓ(F(x)) less ∂ℓ/∂ε, which has zero mean and most of the
variance, is a sample of R_drop, and the second-order terms along the same η are samples of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrop.diagnosis.measure.estimates import Estimate, Samples
from undrop.diagnosis.measure.expansion import Expanded, Expander, Terms
from undrop.diagnosis.measure.model import MeasuredModel, NumberedBatch, SiteNoise, collect
from undrop.losses import Loss


class MaskSample(NamedTuple):
    """One mask on a batch, or the expectation over masks."""

    r_drop: float
    half_quadratic: float
    """½uᵀHu."""
    curvature: float
    """½Dℓ·∂²F/∂ε²."""


class Parts(NamedTuple):
    """R_drop and its parts: ``r_drop = half_quadratic + curvature + rest``."""

    r_drop: Estimate
    half_quadratic: Estimate
    curvature: Estimate
    rest: Estimate
    """What second order misses."""


def parts_of(samples: Samples[Any], read: Callable[[Any], MaskSample | None]) -> Parts:
    """The parts, all from the samples that have all of them, so that they add up."""

    def mean(figure: Callable[[MaskSample], float]) -> Estimate:
        def of(sample: Any) -> float | None:
            found = read(sample)
            return None if found is None else figure(found)

        return samples.mean(of)

    return Parts(
        mean(lambda s: s.r_drop),
        mean(lambda s: s.half_quadratic),
        mean(lambda s: s.curvature),
        mean(lambda s: s.r_drop - s.half_quadratic - s.curvature),
    )


def sample_mask(
    measured: MeasuredModel,
    batch: NumberedBatch,
    expanded: Expanded,
    base: float,
    noise: SiteNoise,
) -> tuple[MaskSample, Terms]:
    """Sample R_drop and its parts along one mask.

    Args:
        measured: the model.
        batch: the batch.
        expanded: the batch, expanded at ε = 0.
        base: ℓ(F(x)).
        noise: σ·η of dropout at the sites that drop.
    """
    terms = expanded.along(noise)
    total = terms.total
    r_drop = measured.loss_value(batch, noise) - base - total.directional
    return MaskSample(r_drop, total.half_quadratic, total.curvature), terms


class RDrop(NamedTuple):
    """R_drop, its parts, and how much of it is quadratic."""

    parts: Parts
    quadratic_share: Estimate
    """½E[uᵀHu] / R_drop."""
    masks: int


def measure_r_drop(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss | Callable[[Tensor, Any], Tensor] | None = None,
    masks: int = 8,
    generator: torch.Generator | None = None,
    max_batches: int = 1000,
) -> RDrop:
    """Measure R_drop beside ½E[uᵀHu], with the same number of masks on every batch.

    Args:
        model: any module with dropout; it is left as it was.
        batches: pairs (inputs, targets).
        loss: as for an objective.
        masks: the number of masks per batch.
        generator: seeds the masks.
        max_batches: the largest number of batches to take.
    """
    measured = MeasuredModel(model, collect(batches, max_batches), loss=loss, generator=generator)
    samples: Samples[MaskSample] = Samples()
    with measured.preserved():
        expander = Expander(measured)
        for batch in measured.batches:
            expanded = expander(batch)
            base = measured.loss_value(batch, {})
            for _ in range(masks):
                noise = measured.draw_masks(expanded.found)
                sample, _ = sample_mask(measured, batch, expanded, base, noise)
                samples.add(batch.number, expanded.count, sample)
    share = samples.ratio(lambda s: s.half_quadratic, lambda s: s.r_drop)
    return RDrop(parts_of(samples, lambda s: s), share, samples.count)
