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

    One matrix product makes all of them, and two multiply the gradients back. ``terms`` are ℓ, the
    quadratic form and ∂ℓ/∂ε of each row. The last k rows have a tangent, the others only have ℓ.
    The gradients of z and u take the memory of u and z: the rows of the matrix are

        logits       [z of rows without a tangent; z of the others;    u]
        gradients    [dz of rows without a tangent; du; dz of the others]

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
        stack = self.source = rows.features
        k = 0 if rows.tangent is None else len(rows.tangent)
        if rows.tangent is not None:
            stack = torch.cat((rows.features, rows.tangent))
            plain, moved = torch.split_with_sizes(rows.features, (n - k, k))
            self.source = torch.cat((plain, rows.tangent, moved))
        z = scratch.take("logits", n + k, classes, weight.dtype)
        self.z = torch.mm(stack, weight.t(), out=z).to(dtype)
        self.plain = n - k
        self.work: Work | None = None
        if k:
            p = scratch.take("probabilities", k, classes, dtype)
            self.work = Work(v=self.z[n:], pv=self.z[self.plain : n], p=p)
        self.terms = self._measure(at_once)

    @property
    def p(self) -> Tensor:
        """The probabilities, where all rows have a tangent or none has."""
        return self.z if self.work is None else self.work.p

    @property
    def dz(self) -> Tensor:
        """The gradients of the logits, where all rows have a tangent or none has."""
        return self.z if self.work is None else self.work.v

    def _blocks(self) -> list[tuple[slice, slice | None]]:
        """Blocks of rows; for each its place among the rows with a tangent, or None."""
        n, classes = len(self.target), len(self.weight)
        moved = row_blocks(n - self.plain, classes)
        return [
            *((rows, None) for rows in row_blocks(self.plain, classes)),
            *((slice(self.plain + b.start, self.plain + b.stop), b) for b in moved),
        ]

    def _measure(self, at_once: Coefficients | None) -> Terms:
        parts = []
        for rows, moved in self._blocks():
            z, target = self.z[rows], self.target[rows]
            if self.bias is not None:
                z.add_(self.bias)
            if moved is None or self.work is None:
                terms = Terms.of_loss(loss_rows(z, target, self.rule.smoothing, z))
            else:
                work = self.work.part(moved)
                terms = tangent_rows(z, work.v, target, self.rule, work)
            if at_once is not None:
                self._differentiate(rows, moved, at_once.part(rows), terms)
            parts.append(terms)
        return Terms.joined(parts) if len(parts) > 1 else parts[0]

    def differentiate(self, c: Coefficients, terms: Terms) -> None:
        """Overwrite the logits with the gradients of the total."""
        for rows, moved in self._blocks():
            self._differentiate(rows, moved, c.part(rows), terms.part(rows))

    def _differentiate(
        self, rows: slice, moved: slice | None, c: Coefficients, terms: Terms
    ) -> None:
        target = self.target[rows]
        if moved is None or self.work is None:
            loss_gradient_(self.z[rows], target, self.rule.smoothing, c.loss)
        else:
            tangent_gradients_(self.work.part(moved), terms, target, self.rule, c)

    def multiply_back(
        self, weight: Tensor | None, bias: Tensor | None, *, inputs: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Add the gradients of W and b where needed; return those of f and ḟ if needed."""
        g, n = self.z.to(self.weight.dtype), len(self.target)
        if weight is not None:
            add_product_(weight, g.t(), self.source)
        if bias is not None:
            for part in (self.z[: self.plain], self.z[n:]):
                bias.add_(part.sum(0))
        if not inputs:
            return None
        back = g @ self.weight
        if self.work is None:
            return back, None
        features = torch.cat((back[: self.plain], back[n:])) if self.plain else back[n:]
        return features, back[self.plain : n]


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

    def sweep(self, rows: Rows, parameters: Parameters, rule: Rule, to: Gradients) -> Tensor:
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
                places = (part, rows.of_tangent(part))
                for target, gradient, place in zip(to[:2], back or (), places, strict=False):
                    if target is not None and gradient is not None:
                        target[place] = gradient
        return means

    def plain(self, rows: Rows, parameters: Parameters, smoothing: float) -> Tensor:
        """``F.cross_entropy`` of all logits."""
        weight, bias = parameters
        assert weight is not None
        logits = F.linear(rows.features, weight, bias)
        losses = F.cross_entropy(logits, rows.target, reduction="none", label_smoothing=smoothing)
        return (losses * rows.weight).sum()
