"""The adaptive softmax with its loss, along a tangent.

The head's softmax is over the shortlist and one class for each tail c, whose probability is π_c.
Each tail has a softmax over its own words. With the variance Var of the logits' tangent under a softmax,

    uᵀHu = Var_head + Σ_c π_c Var_c.

This is the Fisher form: the second derivative for one label contains only the tail of that label, and
the form is its mean over all labels. So every row needs every tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.kernels.output_layers import OutputLayer, Parameters, softmax_terms
from undrop.kernels.softmax import Derivatives, OutputRows, SoftmaxOptions, working_dtype


class Layer(NamedTuple):
    """The layer ``W P f + b``; the head has no P."""

    projection: Tensor | None  # P (projected, features), None for the identity
    weight: Tensor  # W (classes, projected)
    bias: Tensor | None  # b (classes,)

    def logits(self, features: Tensor) -> Tensor:
        """Return W P f + b."""
        if self.projection is not None:
            features = F.linear(features, self.projection)
        return F.linear(features, self.weight, self.bias)


class AdaptiveOutput(OutputLayer):
    """The adaptive softmax of features f with its loss -log p(y | f).

    ``cutoffs`` are the first words of the tails.
    """

    def __init__(
        self, head: Layer, tails: Sequence[Layer], cutoffs: Sequence[int], chunk: int | None
    ) -> None:
        self.parameters = tuple(x for layer in (head, *tails) for x in layer)
        self.shortlist = cutoffs[0]
        self.num_classes = cutoffs[-1] + len(tails[-1].weight)
        self.tails = [range(a, b) for a, b in pairwise((*cutoffs, self.num_classes))]
        self.softmax_size = max(len(layer.weight) for layer in (head, *tails))
        self.chunk, self.width = chunk, head.weight.shape[1]

    def layers(self, parameters: Parameters) -> list[Layer]:
        """Return the head and the tails."""
        return [Layer(*parameters[n : n + 3]) for n in range(0, len(parameters), 3)]  # type: ignore[arg-type]

    def terms(
        self, rows: OutputRows, parameters: Parameters, options: SoftmaxOptions
    ) -> Derivatives:
        """Return the terms of the head for all rows that count, plus those of each tail.

        With a tangent, a tail processes all rows; without one, only the rows of its own words.
        """
        counted = (rows.weight > 0).nonzero().squeeze(-1)
        if len(counted) < len(rows.weight):
            rows = OutputRows(*(None if x is None else x.index_select(0, counted) for x in rows))  # type: ignore[arg-type]
        f, df, target, weight = rows
        head, *tails = self.layers(parameters)
        z, u = _logits(head, f, df)
        # The factor of a tail's quadratic form: π_c, or 1 for the identity
        factors = torch.ones_like(z) if options.form == "identity" else z.softmax(-1)
        head_target = self.head_target(target)
        terms = softmax_terms(z, u, head_target, options)
        loss, quadratic, directional = (weight @ x for x in terms)
        for column, (tail, words) in enumerate(zip(tails, self.tails, strict=True), self.shortlist):
            in_tail = head_target == column
            tail_target = torch.where(in_tail, target - words.start, 0)
            if df is None:
                tail_rows = in_tail.nonzero().squeeze(-1)
                f_tail, y, w = (x.index_select(0, tail_rows) for x in (f, tail_target, weight))
                loss = loss + w @ softmax_terms(*_logits(tail, f_tail, None), y, options).loss
                continue
            terms = softmax_terms(*_logits(tail, f, df), tail_target, options)
            loss = loss + (weight * in_tail) @ terms.loss
            quadratic = quadratic + (weight * factors[:, column]) @ terms.quadratic
            directional = directional + (weight * in_tail) @ terms.directional
        return Derivatives(loss, quadratic, directional)

    def head_target(self, target: Tensor) -> Tensor:
        """Return the class of each target in the head: a word of the shortlist, or the word's tail.

        A target beyond the vocabulary is in the last tail, where torch raises an error.
        """
        tail = torch.zeros_like(target)
        for words in self.tails:
            tail += target >= words.start
        return torch.where(tail > 0, self.shortlist + tail - 1, target)


def _logits(layer: Layer, f: Tensor, df: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the logits of one softmax, and their tangent."""
    dtype = working_dtype(f.dtype)
    u = None if df is None else layer._replace(bias=None).logits(df).to(dtype)
    return layer.logits(f).to(dtype), u
