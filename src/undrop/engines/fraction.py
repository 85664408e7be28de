"""Carrying the tangent for a part of the batch only: cost 1 + ρ instead of 2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from undrop.engines.base import Request
from undrop.errors import EngineError
from undrop.losses import Derivatives

__all__ = ["Carried"]


class Carried:
    """The examples of a batch, those that carry the tangent first.

    A random share ρ of the examples is moved to the front; ``inputs`` and ``targets`` are the batch in
    that order, and ``restore`` undoes it on the output.
    """

    def __init__(self, request: Request) -> None:
        self.dim = request.batch_dim
        self.inputs, self.targets = request.inputs, request.targets
        self._back: Tensor | None = None
        self.batch = self.rows = 0
        if request.fraction < 1.0:
            self.batch = _batch_size(request)
            self.rows = max(1, round(request.fraction * self.batch))
        if self.rows < self.batch:
            device = request.targets.device
            order = torch.randperm(
                self.batch, generator=request.draw.generator(device), device=device
            )
            self._back = torch.argsort(order)
            self.inputs = self._permuted(request.inputs, order)
            self.targets = self._permuted(request.targets, order)

    @property
    def whole(self) -> bool:
        """Whether every example carries the tangent."""
        return self._back is None

    def first(self, tree: Any) -> Any:
        """The carrying examples of every tensor that has the batch."""
        return self._narrowed(tree, 0, self.rows)

    def rest(self, tree: Any) -> Any:
        """The other examples of every tensor that has the batch."""
        return self._narrowed(tree, self.rows, self.batch - self.rows)

    def restore(self, output: Any) -> Any:
        """The model's output with its examples in the batch's own order."""
        return output if self._back is None else self._permuted(output, self._back)

    def joined(self, first: Any, rest: Any) -> Any:
        """One output, in the batch's own order, from that of the first examples and the rest."""

        def join(a: Any, b: Any) -> Any:
            if isinstance(a, Tensor) and a.dim() > self.dim and a.shape[self.dim] == self.rows:
                return torch.cat((a, b), self.dim)
            return a

        return self.restore(tree_map(join, first, rest))

    def combined(
        self, request: Request, logits: Tensor, u: Tensor, others: Tensor
    ) -> tuple[Tensor, Derivatives]:
        """The weighted total: ℓ over the whole batch, the regularizers over the carrying examples.

        The explicit part is the mean over them. So is the implicit one, times sqrt(ρ): over noise that
        is independent between examples this keeps its covariance exactly. Of noise that all examples
        share (DropConnect) it keeps the terms of each example with itself and shrinks those between
        examples by ρ.

        Args:
            request: what was asked.
            logits: the output for the carrying examples.
            u: its tangent.
            others: the output for the other examples.
        """
        mine, theirs = self.first(self.targets), self.rest(self.targets)
        n, m = request.loss.count(logits, mine), request.loss.count(others, theirs)
        share = float(n / (n + m))
        rho = self.rows / self.batch
        c = request.weights
        total, parts = request.loss.combined(
            logits, u, mine, request.form, (c.loss * share, c.explicit, c.implicit * math.sqrt(rho))
        )
        loss = request.loss.value(others, theirs)
        total = total + c.loss * (1.0 - share) * loss
        return total, Derivatives(
            share * parts.loss + (1.0 - share) * loss.detach(),
            parts.quadratic,
            math.sqrt(rho) * parts.directional,
        )

    def _has_batch(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() > self.dim and x.shape[self.dim] == self.batch

    def _permuted(self, tree: Any, order: Tensor) -> Any:
        return tree_map(
            lambda x: x.index_select(self.dim, order) if self._has_batch(x) else x, tree
        )

    def _narrowed(self, tree: Any, start: int, length: int) -> Any:
        return tree_map(
            lambda x: x.narrow(self.dim, start, length) if self._has_batch(x) else x, tree
        )


def _batch_size(request: Request) -> int:
    tensors = [t for t in tree_leaves(request.targets) if isinstance(t, Tensor)]
    if not tensors or tensors[0].dim() <= request.batch_dim:
        raise EngineError(
            f"fraction < 1 needs targets with a batch in dimension {request.batch_dim}: set "
            "batch_dim to the dimension that holds it."
        )
    return tensors[0].shape[request.batch_dim]
