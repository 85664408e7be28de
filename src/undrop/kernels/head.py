"""A linear layer and softmax cross-entropy on it, for a chunk of rows at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.kernels.fused import Gradients, Output, Parameters, Rows, row_chunks
from undrop.kernels.softmax import (
    Coefficients,
    Rule,
    Terms,
    Work,
    loss_gradient_,
    loss_rows,
    row_blocks,
    tangent_gradients_,
    tangent_rows,
    working_dtype,
)

__all__ = ["LinearOutput", "Scratch", "SoftmaxChunk", "add_product_"]


class Scratch:
    """Buffers that chunks share: fresh pages would cost as much as a pass over them."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A matrix of arbitrary values."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < rows * columns:
            buffer = self._like.new_empty(rows * columns, dtype=dtype)
            self._buffers[name, dtype] = buffer
        return buffer[: rows * columns].view(rows, columns)


class SoftmaxChunk:
    """The logits ``z = W f + b`` and ``u = W ḟ`` of a chunk of rows, and their gradients.

    ``terms`` are ℓ, the quadratic form and ∂ℓ/∂ε of each row, and ``p`` the probabilities. Rows
    without a tangent only have ℓ.

    Args:
        rows: the chunk.
        weight: W.
        bias: b.
        rule: how to treat rows.
        scratch: where to take buffers from.
        at_once: coefficients (columns) to ``differentiate`` with at once, while rows are in cache.
    """

    def __init__(
        self,
        rows: Rows,
        weight: Tensor,
        bias: Tensor | None,
        rule: Rule,
        scratch: Scratch,
        *,
        at_once: Coefficients | None = None,
    ) -> None:
        self.target, self.rule, self.weight, self.bias = rows.target, rule, weight, bias
        n, classes, dtype = len(rows.target), len(weight), working_dtype(weight.dtype)
        stack = rows.features
        if rows.tangent is not None:
            # The first two give the logits and their tangent. Their gradients take the same memory
            # in the opposite order, which is the order of the last two.
            stack = torch.cat((rows.features, rows.tangent, rows.features))
        count = n if rows.tangent is None else 2 * n
        z = scratch.take("logits", count, classes, weight.dtype)
        self.z = torch.mm(stack[:count], weight.t(), out=z).to(dtype)
        self.source = stack[-count:]
        self.p = self.dz = self.z
        self.work: Work | None = None
        if rows.tangent is not None:
            self.p, self.dz = scratch.take("probabilities", n, classes, dtype), self.z[n:]
            self.work = Work(v=self.dz, pv=self.z[:n], p=self.p)
        self.terms = self._measure(at_once)

    def _measure(self, at_once: Coefficients | None) -> Terms:
        n, parts = len(self.target), []
        for rows in row_blocks(n, len(self.weight)):
            z, target = self.z[:n][rows], self.target[rows]
            if self.bias is not None:
                z.add_(self.bias)
            if self.work is None:
                terms = Terms.of_loss(loss_rows(z, target, self.rule.smoothing, z))
            else:
                terms = tangent_rows(z, self.dz[rows], target, self.rule, self.work.part(rows))
            if at_once is not None:
                self._differentiate(rows, at_once.part(rows), terms)
            parts.append(terms)
        return Terms.joined(parts)

    def differentiate(self, c: Coefficients, terms: Terms) -> None:
        """Overwrite the logits with the gradients of the total: ``dz``, and that of u."""
        for rows in row_blocks(len(self.target), len(self.weight)):
            self._differentiate(rows, c.part(rows), terms.part(rows))

    def _differentiate(self, rows: slice, c: Coefficients, terms: Terms) -> None:
        target = self.target[rows]
        if self.work is None:
            loss_gradient_(self.z[rows], target, self.rule.smoothing, c.loss)
        else:
            tangent_gradients_(self.work.part(rows), terms, target, self.rule, c)

    def multiply_back(
        self, weight: Tensor | None, bias: Tensor | None, *, inputs: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Add the gradients of W and b where needed; return those of f and ḟ if needed."""
        g, n = self.z.to(self.weight.dtype), len(self.target)
        if weight is not None:
            add_product_(weight, g.t(), self.source)
        if bias is not None:
            bias.add_(self.dz.sum(0))
        if not inputs:
            return None
        back = g @ self.weight
        return (back, None) if self.work is None else (back[n:], back[:n])


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, summed in the total's type where that is the higher one."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


class LinearOutput(Output):
    """Cross-entropy on ``W f + b``; the parameters are W (classes, features) and b (classes,).

    Args:
        weight: W.
        bias: b, or None.
        chunk: rows at a time; None chooses by the number of classes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, chunk: int | None) -> None:
        self.parameters = (weight, bias)
        self.chunk = chunk

    def _sweep(self, rows: Rows, parameters: Parameters, rule: Rule, to: Gradients) -> Tensor:
        """Chunk by chunk, with the gradients of the logits in their place."""
        weight, bias = parameters
        assert weight is not None
        scratch = Scratch(rows.features)
        means = rows.features.new_zeros(3, dtype=working_dtype(weight.dtype))
        inputs = to.features is not None or to.tangent is not None
        for part in row_chunks(len(rows.target), len(weight), self.chunk):
            some = rows.part(part)
            c = None if rule.coefficients is None else rule.coefficients.times(some.weight)
            chunk = SoftmaxChunk(some, weight, bias, rule, scratch, at_once=c)
            means += chunk.terms.sums(some.weight)
            if c is not None:
                back = chunk.multiply_back(*to.parameters, inputs=inputs)
                for target, gradient in zip(to[:2], back or (), strict=False):
                    if target is not None and gradient is not None:
                        target[part] = gradient
        return means

    def plain(self, rows: Rows, parameters: Parameters, smoothing: float) -> Tensor:
        """``F.cross_entropy`` of all logits."""
        weight, bias = parameters
        assert weight is not None
        logits = F.linear(rows.features, weight, bias)
        losses = F.cross_entropy(logits, rows.target, reduction="none", label_smoothing=smoothing)
        return (losses * rows.weight).sum()
