"""The adaptive softmax on features, its layers inside the loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from undrop.errors import OptionError
from undrop.kernels.adaptive import AdaptiveOutput, Layer
from undrop.kernels.output_layers import row_chunks
from undrop.kernels.softmax import SoftmaxOptions
from undrop.losses.softmax import FeatureLoss


class AdaptiveSoftmax(FeatureLoss):
    """ℓ = -log p(y | f) of ``torch.nn.AdaptiveLogSoftmaxWithLoss``, on features f (…, d).

    The head is a softmax over the shortlist and one class for each tail c, of probability π_c, and
    each tail is a softmax of its own. The quadratic form is the Fisher one, the mean over labels of
    the second derivative: ``uᵀHu = Var_head + Σ_c π_c Var_c``, where Var is the variance of the
    logits' tangent under a softmax. The form "identity" is the squared norm of that tangent, over
    all logits.

    Args:
        head_weight: (shortlist + tails, d).
        head_bias: (shortlist + tails,), or None.
        tails: for each a projection (d_c, d) or None, a weight (words, d_c), a bias (words,) or None.
        cutoffs: the first word of each tail.
        ignore_index: targets of this value do not count.
        chunk: rows at a time; None chooses by the number of classes.
    """

    def __init__(
        self,
        head_weight: Tensor,
        head_bias: Tensor | None,
        *,
        tails: Sequence[tuple[Tensor | None, Tensor, Tensor | None]],
        cutoffs: Sequence[int],
        ignore_index: int = -100,
        chunk: int | None = None,
    ) -> None:
        _check_sizes(head_weight, [weight for _, weight, _ in tails], cutoffs)
        head = Layer(None, head_weight, head_bias)
        output = AdaptiveOutput(head, [Layer(*tail) for tail in tails], cutoffs, chunk)
        super().__init__(
            output, width=head_weight.shape[1], classes=output.words, ignore_index=ignore_index
        )
        self.adaptive = output

    @torch.no_grad()
    def _draw(self, features: Tensor, generator: torch.Generator | None) -> Tensor:
        """A label for each row: a class of the head, and if that is a tail, a word in *that* tail."""

        def pick(layer: Layer, rows: Tensor) -> Tensor:
            p = torch.softmax(layer.logits(rows).float(), -1)
            return torch.multinomial(p, 1, generator=generator).squeeze(-1)

        head, *tails = self.adaptive.layers(self.adaptive.parameters)
        labels = pick(head, features)
        chosen = labels - self.adaptive.shortlist
        for number, (tail, words) in enumerate(zip(tails, self.adaptive.tails, strict=True)):
            own = chosen == number
            if bool(own.any()):
                labels[own] = words.start + pick(tail, features[own])
        return labels

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Σ ℓ_ŷ with ŷ drawn from the model."""
        kept = self._kept(output, target)  # the value that is ignored may be one of the classes
        rows = kept.detach()
        parts = row_chunks(len(rows), self.adaptive.classes, self.chunk)
        none = torch.empty(0, dtype=torch.long, device=rows.device)
        labels = torch.cat([none, *(self._draw(rows[part], generator) for part in parts)])
        return self.adaptive.loss(kept, labels, SoftmaxOptions(ignore_index=-1)) * self.count(
            output, target
        )

    def _probe(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """⟨v, z⟩ with random signs v on all logits z, those of the head and of every tail."""
        features = self._kept(output, target)
        layers = self.adaptive.layers(self.adaptive.parameters)
        logits = torch.cat([layer.logits(features) for layer in layers], -1)
        return super()._probe(logits, target, generator)


def _check_sizes(head: Tensor, tails: Sequence[Tensor], cutoffs: Sequence[int]) -> None:
    increasing = all(a < b for a, b in pairwise((0, *cutoffs)))
    if not cutoffs or not increasing or len(cutoffs) != len(tails):
        raise OptionError(
            f"cutoffs must be the first word of each of the {len(tails)} tails, increasing, got "
            f"{list(cutoffs)}."
        )
    words = [b - a for a, b in pairwise(cutoffs)]
    sizes = [len(weight) for weight in tails]
    if len(head) != cutoffs[0] + len(tails) or sizes[:-1] != words:
        raise OptionError(
            f"cutoffs {list(cutoffs)} need a head of {cutoffs[0] + len(tails)} classes and tails of "
            f"{words} words and a last one, got {len(head)} and {sizes}."
        )
