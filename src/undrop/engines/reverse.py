"""The paper's own way: sampled labels, Jacobians by reverse mode, and a double backward."""

from __future__ import annotations

import torch
from torch import Tensor

from undrop.engines.base import ENGINES, Engine, Evaluation, Request, WeightedParts
from undrop.engines.blind_spots import pass_to_differentiate
from undrop.engines.draw import ZeroLeaves


@ENGINES.register("reverse")
class Reverse(Engine):
    """Algorithm 3 of the paper, for any mask structure.

    With ŷ ~ p for every term and S = Σ ℓ_ŷ, the explicit part is Σ_j σ_j² (∂S/∂z_j)² / N: since the
    gradients of different terms have zero mean and are independent, the square of their sum has the
    right mean even if terms share an η. Its *value* is unbiased; its gradient is not, since the
    sampling probabilities are not differentiated. The implicit part is Σ_j σ_j η_j ∂ℓ/∂z_j.
    """

    name = "reverse"

    def evaluate(self, request: Request) -> Evaluation:
        """The weighted total; its backward pass is a double backward of the model."""
        output, logits, action = pass_to_differentiate(self, request)
        c = request.coefficients
        loss = request.loss.twice_differentiable_value(logits, request.batch.targets)
        zero = torch.zeros_like(loss)
        # Labels can't be drawn from a non-finite output; the caller sees a non-finite loss.
        sound = bool(c.quadratic) and bool(loss.detach().isfinite())
        explicit = self._explicit(request, action, logits) if sound else zero
        implicit = self._implicit(request, action, loss) if c.directional else zero
        total = c.loss * loss + c.quadratic * explicit + c.directional * implicit
        return Evaluation(
            total, WeightedParts(c, (loss, explicit, implicit)), lambda: output, self.name
        )

    def _explicit(self, request: Request, action: ZeroLeaves, logits: Tensor) -> Tensor:
        generator = request.draw.generator(logits.device)
        sampled = request.loss.sampled(logits, request.batch.targets, request.form, generator)
        gradients = _gradients(sampled, action)
        squares = [
            request.draw.scale(site) ** 2 * gradient.square().sum()
            for site, gradient in zip(action.sites, gradients, strict=True)
        ]
        total = torch.stack(squares).sum() / request.loss.count(logits, request.batch.targets)
        return total

    def _implicit(self, request: Request, action: ZeroLeaves, loss: Tensor) -> Tensor:
        products = []
        for site, leaf, gradient in zip(
            action.sites, action.leaves, _gradients(loss, action), strict=True
        ):
            noise = request.draw.sigma_eta(site, leaf)
            if noise is not None:
                products.append((gradient * noise).sum())
        return torch.stack(products).sum()


def _gradients(scalar: Tensor, action: ZeroLeaves) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        scalar, action.leaves, create_graph=True, allow_unused=True, materialize_grads=True
    )
