"""Losses of single elements of the output: binary cross-entropy on logits, and squared error."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrop.kernels.softmax import Derivatives
from undrop.losses.base import (
    CONVERTERS,
    ByClass,
    ClosedForm,
    count_tensor,
    entries_with_tangent,
    is_plain_mean,
    to_working_dtype,
)
from undrop.losses.targets import check_like_output, check_range


class Elementwise(ClosedForm):
    """A mean over all elements, so H is diagonal. A subclass computes ∂ℓ/∂F and ∂²ℓ/∂F²."""

    @abstractmethod
    def slope_and_curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return ∂ℓ/∂F and ∂²ℓ/∂F² of each element."""

    def check(self, output: Tensor, target: Tensor) -> None:
        """Check that targets are floating-point numbers of the output's shape."""
        check_like_output(output, target)

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the number of elements."""
        return count_tensor(output.numel(), output)

    def _derivatives_of_part(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, dim: int
    ) -> Derivatives:
        u = to_working_dtype(u)
        with_tangent = (entries_with_tangent(x, u, dim) for x in (to_working_dtype(output), target))
        slope, curvature = self.slope_and_curvature(*with_tangent)
        squares = curvature * u.square() if form == "hessian" else u.square()
        n = max(output.numel(), 1)
        return Derivatives(self.value(output, target), squares.sum() / n, (slope * u).sum() / n)

    @torch.no_grad()
    def by_class(self, output: Tensor, u: Tensor, target: Tensor) -> ByClass | None:
        """Return the parts with each feature as a class; None for an output with fewer than two dims."""
        if u.dim() < 2:
            return None
        _, curvature = self.slope_and_curvature(output.double(), target)
        parts = (curvature * u.double().square(), curvature)
        return ByClass(*(x.flatten(0, -2).sum(0) for x in parts))


class BCEWithLogits(Elementwise):
    """ℓ = -y log s - (1-y) log(1-s) with s = sigmoid(F), a mean over all elements.

    The Hessian is diagonal, s(1-s), so uᵀHu = s(1-s)·u²; ∂ℓ/∂ε = (s - y)·u.
    """

    def slope_and_curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return s - y and s(1-s)."""
        s = torch.sigmoid(output)
        return s - target, s * torch.sigmoid(-output)

    def check_values(self, output: Tensor, target: Tensor) -> None:
        """Check that targets are probabilities."""
        check_range(target, 0.0, 1.0)

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over elements."""
        output = to_working_dtype(output)
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        output = to_working_dtype(output)
        label = torch.bernoulli(torch.sigmoid(output.detach()), generator=generator)
        return F.binary_cross_entropy_with_logits(output, label, reduction="sum")


class MSE(Elementwise):
    """ℓ = (F - y)², a mean over all elements; uᵀHu = 2u² and ∂ℓ/∂ε = 2(F - y)·u."""

    def slope_and_curvature(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return 2(F - y) and 2."""
        return 2.0 * (output - target), torch.full_like(output, 2.0)

    def check_values(self, output: Tensor, target: Tensor) -> None:
        """Check that no target is NaN."""
        check_range(target, -math.inf, math.inf)

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over elements."""
        return (to_working_dtype(output) - target).square().mean()

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return Σ ℓ_ŷ for ŷ ~ N(F, ½), whose negative log-likelihood is ℓ; so E[g gᵀ] = 2·I = H."""
        output = to_working_dtype(output)
        noise = torch.empty_like(output).normal_(generator=generator)
        label = output.detach() + noise.mul_(math.sqrt(0.5))
        return (output - label).square().sum()


@CONVERTERS.register(nn.BCEWithLogitsLoss)
def _convert_bce(loss: nn.BCEWithLogitsLoss) -> BCEWithLogits | None:
    return BCEWithLogits() if is_plain_mean(loss) and loss.pos_weight is None else None


@CONVERTERS.register(nn.MSELoss)
def _convert_mse(loss: nn.MSELoss) -> MSE | None:
    return MSE() if is_plain_mean(loss) else None
