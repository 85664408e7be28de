"""Softmax cross-entropy on features, with a linear output layer inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.errors import OptionError
from undrop.kernels.output_layers import LinearOutput, row_chunks
from undrop.kernels.softmax import SoftmaxOptions
from undrop.losses.base import ByClass, precise, softmax_by_class
from undrop.losses.softmax import FeatureLoss


class LinearCrossEntropy(FeatureLoss):
    """``CrossEntropy`` on the logits ``W f + b`` of features f (…, d), which are never held at once.

    Logits live for a chunk of rows at a time: they are made, turned into gradients and multiplied
    back, so that memory does not grow as rows × classes. Only the reverse engine, which
    differentiates twice, holds them all.

    Args:
        weight: W (classes, d), e.g. the embedding that the output layer is tied to.
        bias: b (classes,).
        ignore_index: targets of this value do not count.
        label_smoothing: α in [0, 1): the target is (1-α)·1_y + α/C. H does not depend on it.
        chunk: rows at a time; None chooses by the number of classes.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        chunk: int | None = None,
    ) -> None:
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise OptionError(
                "the output layer must have a weight (classes, features) and a bias (classes,), got "
                f"{tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}."
            )
        super().__init__(
            LinearOutput(weight, bias, chunk),
            width=weight.shape[1],
            classes=weight.shape[0],
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
        self.weight, self.bias = weight, bias

    def by_class(self, output: Tensor, u: Tensor, target: Tensor) -> ByClass:
        """Σ p v² of the logits, class by class, a chunk of rows at a time."""
        return softmax_by_class(
            self._kept(output, target),
            self._kept(u, target),
            self.classes,
            lambda rows: F.linear(rows, self.weight, self.bias),
            lambda tangents: F.linear(tangents, self.weight),
        )

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Σ ℓ_ŷ with ŷ ~ softmax(W f + b), drawn a chunk of rows at a time."""
        kept = self._kept(output, target)  # the value that is ignored may be one of the classes
        rows = kept.detach()
        labels = torch.empty(len(rows), dtype=torch.long, device=rows.device)
        with torch.no_grad():
            for part in row_chunks(len(rows), self.classes, self.chunk):
                logits = precise(F.linear(rows[part], self.weight, self.bias))
                p = torch.softmax(logits, -1)
                labels[part] = torch.multinomial(p, 1, generator=generator).squeeze(-1)
        return self.layer.loss(kept, labels, SoftmaxOptions(ignore_index=-1)) * self.count(
            output, target
        )

    def _probe(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """⟨v, W f + b⟩ with random signs v on the logits, as ``CrossEntropy`` has it."""
        features = self._kept(output, target)
        return super()._probe(F.linear(features, self.weight, self.bias), target, generator)
