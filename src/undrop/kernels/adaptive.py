"""The adaptive softmax with its loss, along a tangent, for a chunk of rows at a time.

The head's softmax p is over the shortlist and one class for each tail c, whose probability is π_c;
each tail has a softmax of its own. With Var the variance of the logits' tangent under a softmax,

    uᵀHu = Var_head + Σ_c π_c Var_c,

the expectation over labels of the second derivative (the Fisher form; that of one label would have
its own tail alone). It is a sum over every tail for every row. Drawing one tail per row, c with
probability π_c, gives an unbiased estimate, gradient included, at the cost of the drawn tails' rows
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.kernels.fused import Gradients, Output, Parameters, Rows, row_chunks
from undrop.kernels.head import Scratch, SoftmaxChunk, add_product_
from undrop.kernels.softmax import Coefficients, Rule, working_dtype


class Layer(NamedTuple):
    """``W P f + b``, or the gradients of such a layer; the head has no P."""

    projection: Tensor | None  # P (projected, features), None for the identity
    weight: Tensor | None  # W (classes, projected)
    bias: Tensor | None  # b (classes,)

    @property
    def classes(self) -> int:
        """The number of rows of W."""
        return 0 if self.weight is None else len(self.weight)

    def hidden(self, rows: Rows) -> Rows:
        """The rows P f, and P ḟ."""
        if self.projection is None:
            return rows
        tangent = None if rows.tangent is None else rows.tangent @ self.projection.t()
        return rows._replace(features=rows.features @ self.projection.t(), tangent=tangent)

    def logits(self, features: Tensor) -> Tensor:
        """W P f + b in plain operations."""
        assert self.weight is not None
        if self.projection is not None:
            features = F.linear(features, self.projection)
        return F.linear(features, self.weight, self.bias)


class _Tail(NamedTuple):
    """A tail of the vocabulary, and where its gradients go."""

    number: int
    words: range
    layer: Layer
    to: Layer


class AdaptiveOutput(Output):
    """-log p(y | f) with a head and tails.

    Args:
        head: the layer of the shortlist, with one more class for each tail.
        tails: the layers of the tails.
        cutoffs: the first word of each tail.
        chunk: rows at a time; None chooses by the number of classes.
    """

    def __init__(
        self, head: Layer, tails: Sequence[Layer], cutoffs: Sequence[int], chunk: int | None
    ) -> None:
        self.parameters = tuple(x for layer in (head, *tails) for x in layer)
        self.shortlist = cutoffs[0]
        self.classes = cutoffs[-1] + tails[-1].classes
        self.words = [range(a, b) for a, b in pairwise((*cutoffs, self.classes))]
        self.widest = max(layer.classes for layer in (head, *tails))
        self.chunk = chunk

    def layers(self, parameters: Parameters) -> list[Layer]:
        """The head and the tails."""
        return [Layer(*parameters[n : n + 3]) for n in range(0, len(parameters), 3)]

    def sweep(self, rows: Rows, parameters: Parameters, rule: Rule, to: Gradients) -> Tensor:
        """The rows without a tangent, then those with one."""
        n, carrying = len(rows.target), 0 if rows.tangent is None else len(rows.tangent)
        first, last, nothing = slice(0, n - carrying), slice(n - carrying, n), slice(0)
        means = rows.features.new_zeros(3, dtype=working_dtype(rows.features.dtype))
        if carrying < n:
            means += self._sweep(rows.part(first), parameters, rule, to.part(first, nothing))
        if carrying:
            means += self._sweep(rows.part(last), parameters, rule, to.part(last, slice(None)))
        return means

    def _sweep(self, rows: Rows, parameters: Parameters, rule: Rule, to: Gradients) -> Tensor:
        """Chunk by chunk: the head's logits, each tail's, and the head's gradients last."""
        (head, *tails), (to_head, *to_tails) = self.layers(parameters), self.layers(to.parameters)
        every = [
            _Tail(*known)
            for known in zip(range(len(tails)), self.words, tails, to_tails, strict=True)
        ]
        scratch = Scratch(rows.features), Scratch(rows.features)
        draws = None
        if rule.seed is not None and rule.form == "hessian" and rows.tangent is not None:
            draws = torch.Generator(rows.features.device).manual_seed(rule.seed)
        means = rows.features.new_zeros(3, dtype=working_dtype(rows.features.dtype))
        for part in row_chunks(len(rows.target), head.classes, self.chunk):
            into = [None if g is None else g[part] for g in (to.features, to.tangent)]
            chunk = _Chunk(self, rows.part(part), head, rule, scratch, into, draws)
            for tail in every:
                chunk.visit(tail)
            chunk.finish(to_head)
            means += chunk.means
        return means

    def plain(self, rows: Rows, parameters: Parameters, smoothing: float) -> Tensor:
        """Log-softmax of the head for all rows, of each tail for its own."""
        head, *tails = self.layers(parameters)
        losses = F.cross_entropy(
            head.logits(rows.features), self.head_target(rows.target), reduction="none"
        )
        total = (losses * rows.weight).sum()
        for words, tail in zip(self.words, tails, strict=True):
            own = self.members(rows.target, words)
            losses = F.cross_entropy(
                tail.logits(rows.features[own]), rows.target[own] - words.start, reduction="none"
            )
            total = total + (losses * rows.weight[own]).sum()
        return total

    def members(self, target: Tensor, words: range) -> Tensor:
        """Which targets are in a tail; the last tail has all beyond it, which are errors there."""
        last = words.stop == self.classes
        return target >= words.start if last else (target >= words.start) & (target < words.stop)

    def head_target(self, target: Tensor) -> Tensor:
        """The right class of the head: a word of the shortlist, or the word's tail."""
        tail = torch.zeros_like(target)
        for words in self.words:
            tail += target >= words.start
        return torch.where(tail > 0, self.shortlist + tail - 1, target)


class _Chunk:
    """A chunk of rows: the head's logits stay until all tails have been visited."""

    def __init__(
        self,
        output: AdaptiveOutput,
        rows: Rows,
        head: Layer,
        rule: Rule,
        scratch: tuple[Scratch, Scratch],
        into: Parameters,
        draws: torch.Generator | None,
    ) -> None:
        self.output, self.rows, self.rule, self.into = output, rows, rule, into
        self.scratch = scratch[1]
        chosen = rows._replace(target=output.head_target(rows.target))
        assert head.weight is not None
        self.head = SoftmaxChunk(chosen, head.weight, head.bias, rule, scratch[0])
        self.means = self.head.terms.sums(rows.weight)
        self.picks = self.head.p[:, output.shortlist :].clone()
        # π_c Var_c of each row and tail.
        self.variances = torch.zeros_like(self.picks)
        self.drawn: Tensor | None = None
        if draws is not None:
            self.drawn = torch.multinomial(self.head.p, 1, generator=draws) - output.shortlist

    def visit(self, tail: _Tail) -> None:
        """Add a tail's terms and gradients, for the rows that need it."""
        own = self.output.members(self.rows.target, tail.words)
        share = self._share(tail.number)
        which = (own if share is None else own | (share > 0)).nonzero().squeeze(-1)
        for part in row_chunks(len(which), tail.layer.classes, self.output.chunk):
            self._visit(tail, which[part], own, share)

    def _visit(self, tail: _Tail, which: Tensor, own: Tensor, share: Tensor | None) -> None:
        """For the rows ``which``; ``own`` has the tail's words for targets."""
        assert tail.layer.weight is not None
        rows = self.rows.part(which)
        within = (rows.target - tail.words.start).masked_fill_(~own[which], 0)
        rows = rows._replace(target=within)
        chunk = SoftmaxChunk(
            tail.layer.hidden(rows), tail.layer.weight, tail.layer.bias, self.rule, self.scratch
        )
        terms, mine = chunk.terms, own[which].to(self.picks.dtype)
        weight = torch.zeros_like(mine) if share is None else share[which]
        terms = terms._replace(
            loss=terms.loss * mine,
            quadratic=terms.quadratic * weight,
            directional=terms.directional * mine,
        )
        self.means += terms.sums(rows.weight)
        if self.rule.form == "hessian":
            self.variances[which, tail.number] = terms.quadratic
        c = self.rule.coefficients
        if c is not None:
            mine, weight = (x.mul(rows.weight).unsqueeze(-1) for x in (mine, weight))
            columns = Coefficients(c.loss * mine, c.quadratic * weight, c.directional * mine)
            chunk.differentiate(columns, chunk.terms)
            self._multiply_back(chunk, tail, rows, which)

    def _share(self, number: int) -> Tensor | None:
        """The factor of a tail's quadratic form in each row."""
        if self.rows.tangent is None:
            return None
        counts = (self.rows.weight > 0).to(self.picks.dtype)
        if self.rule.form == "identity":
            return counts
        if self.drawn is None:
            return counts * self.picks[:, number]
        return counts * (self.drawn.squeeze(-1) == number)

    def _multiply_back(self, chunk: SoftmaxChunk, tail: _Tail, rows: Rows, which: Tensor) -> None:
        projection, to = tail.layer.projection, tail.to
        wanted = any(g is not None for g in self.into)
        back = chunk.multiply_back(to.weight, to.bias, inputs=wanted or to.projection is not None)
        for g, source, target in zip(back or (), rows[:2], self.into, strict=False):
            if g is None or source is None:
                continue
            if to.projection is not None:
                add_product_(to.projection, g.t(), source)
            if target is not None:
                g = g if projection is None else g @ projection
                target.index_add_(0, which, g.to(target.dtype))

    def finish(self, to: Layer) -> None:
        """The head's gradients, now that Var_c, which its π_c stand before, are known."""
        c = self.rule.coefficients
        if c is None:
            return
        terms = self.head.terms
        if self.rule.form == "hessian":
            # d/dz of Σ_c π_c Var_c is π_c Var_c in the class of tail c, less p Σ_c π_c Var_c.
            terms = terms._replace(quadratic=terms.quadratic + self.variances.sum(-1))
        columns = c.times(self.rows.weight)
        self.head.differentiate(columns, terms)
        self.head.dz[:, self.output.shortlist :].add_(columns.quadratic * self.variances)
        wanted = any(g is not None for g in self.into)
        back = self.head.multiply_back(to.weight, to.bias, inputs=wanted)
        for g, target in zip(back or (), self.into, strict=False):
            if g is not None and target is not None:
                target.add_(g)
