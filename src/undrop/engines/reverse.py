"""The paper's own way: sampled labels, Jacobians by reverse mode, and a double backward."""

from __future__ import annotations

import torch
from torch import Tensor

from undrop.engines.base import Engine, Evaluation, Request, refuse_sharded, weighted_parts
from undrop.engines.double_backward import TWICE_DIFFERENTIABLE
from undrop.engines.draw import ZeroLeaves
from undrop.intercept import Interception

__all__ = ["Reverse"]


class Reverse(Engine):
    """Algorithm 3 of the paper, for any mask structure.

    With ŷ ~ p for every term and S = Σ ℓ_ŷ, the explicit part is Σ_j σ_j² (∂S/∂z_j)² / N: since the
    gradients of different terms have zero mean and are independent, the square of their sum has the
    right mean also where terms share an η. Its *value* is unbiased; its gradient is not, since the
    sampling probabilities are not differentiated. The implicit part is Σ_j σ_j η_j ∂ℓ/∂z_j.
    """

    name = "reverse"

    def evaluate(self, request: Request) -> Evaluation:
        """The weighted total; its backward pass is a double backward of the model."""
        refuse_sharded(self, request.model)
        field = ZeroLeaves(request.draw)
        with Interception(request.model, field, TWICE_DIFFERENTIABLE):
            output, logits = request.run()
        weights = request.weights
        loss = request.loss.twice_differentiable_value(logits, request.targets)
        zero = torch.zeros_like(loss)
        # From an output that is not finite no labels can be drawn; who asked will see it in the loss.
        sound = bool(weights.explicit) and bool(loss.detach().isfinite())
        explicit = self._explicit(request, field, logits) if sound else zero
        implicit = self._implicit(request, field, loss) if weights.implicit else zero
        total = weights.loss * loss + weights.explicit * explicit + weights.implicit * implicit
        return Evaluation(total, weighted_parts(weights, loss, explicit, implicit), output)

    def _explicit(self, request: Request, field: ZeroLeaves, logits: Tensor) -> Tensor:
        generator = request.draw.generator(logits.device)
        sampled = request.loss.sampled(logits, request.targets, request.form, generator)
        gradients = _gradients(sampled, field)
        squares = [
            request.draw.scale(site) ** 2 * gradient.square().sum()
            for site, gradient in zip(field.sites, gradients, strict=True)
        ]
        total = torch.stack(squares).sum() / request.loss.count(logits, request.targets)
        return total

    def _implicit(self, request: Request, field: ZeroLeaves, loss: Tensor) -> Tensor:
        products = []
        for site, leaf, gradient in zip(
            field.sites, field.leaves, _gradients(loss, field), strict=True
        ):
            noise = request.draw.scaled(site, leaf)
            if noise is not None:
                products.append((gradient * noise).sum())
        return torch.stack(products).sum()


def _gradients(scalar: Tensor, field: ZeroLeaves) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        scalar, field.leaves, create_graph=True, allow_unused=True, materialize_grads=True
    )
