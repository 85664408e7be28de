"""Binary cross-entropy on logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


class BCEWithLogits(ClosedForm):
    """ℓ = -y log s - (1-y) log(1-s) with s = sigmoid(F), a mean over all elements.

    The Hessian is diagonal, s(1-s), so uᵀHu = s(1-s)·u²; ∂ℓ/∂ε = (s - y)·u.
    """

    def check(self, output: Tensor, target: Tensor) -> None:
        """Floating-point numbers of the output's shape."""
        check_like_output(output, target)

    def check_values(self, output: Tensor, target: Tensor) -> None:
        """Probabilities."""
        check_range(target, 0.0, 1.0)

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """The number of elements."""
        return number(output.numel(), output)

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over elements."""
        output = precise(output)
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def _derivatives_of_part(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, dim: int
    ) -> Derivatives:
        u = precise(u)
        moved, label = (last_entries(x, u, dim) for x in (precise(output), target))
        s = torch.sigmoid(moved)
        squares = u.square()
        if form == "hessian":
            squares = s * torch.sigmoid(-moved) * squares
        n = max(output.numel(), 1)
        return Derivatives(
            self.value(output, target), squares.sum() / n, ((s - label) * u).sum() / n
        )

    def by_class(self, output: Tensor, u: Tensor, target: Tensor) -> ByClass | None:
        """Each logit is a class, with s(1-s)·u²."""
        s = torch.sigmoid(output.detach().double())
        return elementwise_by_class(s * (1.0 - s), u)

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        output = precise(output)
        label = torch.bernoulli(torch.sigmoid(output.detach()), generator=generator)
        return F.binary_cross_entropy_with_logits(output, label, reduction="sum")


@CONVERTERS.register(nn.BCEWithLogitsLoss)
def _convert(loss: nn.BCEWithLogitsLoss) -> BCEWithLogits | None:
    return BCEWithLogits() if is_plain_mean(loss) and loss.pos_weight is None else None
