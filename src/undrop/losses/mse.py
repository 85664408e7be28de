"""Squared error."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from undrop.losses.base import (
    CONVERTERS,
    ByClass,
    ClosedForm,
    Derivatives,
    elementwise_by_class,
    is_plain_mean,
    last_entries,
    number,
    precise,
)
from undrop.losses.targets import check_like_output, check_range


class MSE(ClosedForm):
    """ℓ = (F - y)², a mean over all elements; uᵀHu = 2u² and ∂ℓ/∂ε = 2(F - y)·u."""

    def check(self, output: Tensor, target: Tensor) -> None:
        """Floating-point numbers of the output's shape."""
        check_like_output(output, target)

    def check_values(self, output: Tensor, target: Tensor) -> None:
        """No NaN."""
        check_range(target, -math.inf, math.inf)

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """The number of elements."""
        return number(output.numel(), output)

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over elements."""
        return (precise(output) - target).square().mean()

    def _derivatives_of_part(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, dim: int
    ) -> Derivatives:
        error, u = precise(output) - target, precise(u)
        curvature = 2.0 if form == "hessian" else 1.0
        n = max(output.numel(), 1)
        return Derivatives(
            error.square().mean(),
            u.square().sum() * (curvature / n),
            (last_entries(error, u, dim) * u).sum() * (2.0 / n),
        )

    def by_class(self, output: Tensor, u: Tensor, target: Tensor) -> ByClass | None:
        """Each output feature counts as a class, with 2u²."""
        return elementwise_by_class(torch.full_like(output, 2.0), u)

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Labels from N(F, ½), the model whose negative log-likelihood is ℓ: E[g gᵀ] = 2."""
        output = precise(output)
        noise = torch.empty_like(output).normal_(generator=generator)
        label = output.detach() + noise.mul_(math.sqrt(0.5))
        return (output - label).square().sum()


@CONVERTERS.register(nn.MSELoss)
def _convert(loss: nn.MSELoss) -> MSE | None:
    return MSE() if is_plain_mean(loss) else None
