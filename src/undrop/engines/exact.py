"""The expectation itself, from full Jacobians: ground truth for tiny networks."""

from __future__ import annotations

import torch
from torch import Tensor

from undrop.engines.base import ENGINES, Engine, Evaluation, Request, WeightedParts
from undrop.engines.blind_spots import pass_to_differentiate
from undrop.engines.draw import ZeroLeaves


@ENGINES.register("exact")
class Exact(Engine):
    """E_η[uᵀHu] = Σ_j σ_j² · (∂F/∂z_j)ᵀ H (∂F/∂z_j), over every entry j of every η.

    The implicit part has zero mean, so it is zero here.
    """

    name = "exact"

    def evaluate(self, request: Request) -> Evaluation:
        """The weighted total, differentiable once more in the parameters."""
        output, logits, action = pass_to_differentiate(self, request)
        loss = request.loss.value(logits, request.batch.targets)
        zero = torch.zeros_like(loss)
        explicit = (
            self._explicit(request, action, logits) if request.coefficients.quadratic else zero
        )
        total = request.coefficients.loss * loss + request.coefficients.quadratic * explicit
        return Evaluation(
            total,
            WeightedParts(request.coefficients, (loss, explicit, zero)),
            lambda: output,
            self.name,
        )

    def _explicit(self, request: Request, action: ZeroLeaves, logits: Tensor) -> Tensor:
        rows = [
            torch.autograd.grad(
                entry, action.leaves, create_graph=True, allow_unused=True, materialize_grads=True
            )
            for entry in logits.flatten()
        ]
        if not rows:  # an empty batch
            return logits.sum()
        explicit = torch.zeros_like(logits.sum())
        for index, site in enumerate(action.sites):
            jacobian = torch.stack(
                [row[index].flatten() for row in rows]
            )  # (outputs, entries of η)
            for column in jacobian.unbind(1):
                u = column.view_as(logits) * request.draw.scale(site)
                explicit = (
                    explicit
                    + request.loss.derivatives(
                        logits, u, request.batch.targets, request.form
                    ).quadratic
                )
        return explicit
