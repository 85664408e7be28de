"""Softmax cross-entropy on features, with the output layer inside the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.errors import OptionError, OutputError
from undrop.kernels.head import Head, head_combined, head_derivatives, head_loss, row_chunks
from undrop.losses.base import Derivatives, Loss
from undrop.losses.targets import check_class_indices

__all__ = ["LinearCrossEntropy"]


class LinearCrossEntropy(Loss):
    """``CrossEntropy`` on the logits ``W f + b`` of features f (…, d), which are never held at once.

    Logits live for a chunk of rows at a time: they are made, turned into gradients and multiplied
    back, so that memory does not grow as rows × classes. Only the reverse engine, which
    differentiates twice, holds them all.

    Args:
        weight: W (classes, d), e.g. the embedding that the output layer is tied to.
        bias: b (classes,).
        ignore_index: targets of this value take no part.
        label_smoothing: α in [0, 1): the target is (1-α)·1_y + α/C. H does not depend on it.
        chunk: rows at a time; by default a number that suits the classes.
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
        if not 0.0 <= label_smoothing < 1.0:
            raise OptionError(f"label_smoothing must lie in [0, 1), got {label_smoothing}.")
        if chunk is not None and chunk < 1:
            raise OptionError(f"chunk must be at least 1 row, got {chunk}.")
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise OptionError(
                "the output layer must have a weight (classes, features) and a bias (classes,), got "
                f"{tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}."
            )
        self.head = Head(weight, bias, chunk)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def check(self, output: Tensor, target: Tensor) -> None:
        """Class indices, one for each row of features."""
        classes, width = self.head.weight.shape
        if output.shape[-1] != width:
            raise OutputError(
                f"the loss takes features of width {width}, that of its output layer, got an output "
                f"of shape {tuple(output.shape)}: have the model return features, not logits."
            )
        check_class_indices(target, tuple(output.shape[:-1]), classes, self.ignore_index)

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """The number of targets that are not ignored."""
        return (target != self.ignore_index).sum().clamp(min=1).to(output.dtype)

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean cross-entropy; 0 where every target is ignored."""
        return head_loss(
            output,
            self.head,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    def _derivatives(self, output: Tensor, u: Tensor, target: Tensor, form: str) -> Derivatives:
        return Derivatives(*head_derivatives(output, u, self.head, target, **self._how(form)))

    def combined(
        self,
        output: Tensor,
        u: Tensor,
        target: Tensor,
        form: str = "hessian",
        weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
    ) -> tuple[Tensor, Derivatives]:
        """The weighted total, its gradient formed in the same sweep over the rows."""
        if form == "loss-jacobian":
            return super().combined(output, u, target, form, weights)
        total, parts = head_combined(output, u, self.head, target, weights, **self._how(form))
        return total, Derivatives(*parts)

    def _how(self, form: str) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "form": form,
        }

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Σ ℓ_ŷ with ŷ ~ softmax(W f + b), drawn a chunk of rows at a time."""
        weight, bias, chunk = self.head
        rows = output.detach().reshape(-1, output.shape[-1])
        labels = torch.empty(len(rows), dtype=torch.long, device=rows.device)
        for part in row_chunks(len(rows), len(weight), chunk):
            p = torch.softmax(F.linear(rows[part], weight.detach(), bias).float(), -1)
            labels[part] = torch.multinomial(p, 1, generator=generator).squeeze(-1)
        labels = labels.view_as(target).masked_fill_(target == self.ignore_index, self.ignore_index)
        mean = head_loss(output, self.head, labels, ignore_index=self.ignore_index)
        return mean * self.count(output, target)

    def _probe(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """⟨v, W f + b⟩ with random signs v on the logits, as ``CrossEntropy`` has it."""
        keep = (target != self.ignore_index).reshape(-1)
        features = output.reshape(-1, output.shape[-1])[keep]
        return super()._probe(F.linear(features, *self.head[:2]), target, generator)
