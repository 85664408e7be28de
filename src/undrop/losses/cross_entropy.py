"""Softmax cross-entropy, the paper's loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrop.kernels.output_layers import Logits
from undrop.kernels.softmax import Coefficients, cross_entropy_and_gradients
from undrop.losses.base import (
    CONVERTERS,
    ByClass,
    TotalAndGradients,
    is_plain_mean,
    softmax_by_class,
    to_working_dtype,
)
from undrop.losses.softmax import SoftmaxLoss, sample_classes
from undrop.losses.targets import not_ignored


class CrossEntropy(SoftmaxLoss):
    """ℓ = -log softmax(F)_y, for logits F and class indices y.

    y has the shape of F without its class dimension. With p = softmax(F) and v = u - Σ_k p_k u_k, the
    quadratic form is uᵀHu = Σ p v², and ∂ℓ/∂ε = Σ p u - u_y. The mean is over targets other than
    ``ignore_index``.

    Args:
        ignore_index: targets of this value do not count.
        label_smoothing: α in [0, 1): the target is (1-α)·1_y + α/C. H does not depend on it.
        class_dim: the dimension of the classes, by default the last. In torch's own loss it is 1; to
            use that convention, pass ``torch.nn.CrossEntropyLoss()``.
    """

    def __init__(
        self, *, ignore_index: int = -100, label_smoothing: float = 0.0, class_dim: int = -1
    ) -> None:
        super().__init__(Logits(), ignore_index, label_smoothing)
        self.class_dim = class_dim

    @property
    def computes_gradients(self) -> bool:  # type: ignore[override]
        """False for subclasses, which may have formulas of their own."""
        return type(self) is CrossEntropy

    def _shape(self, output: Tensor) -> tuple[int, ...]:
        return self.classes_last(output).shape

    def classes_last(self, output: Tensor) -> Tensor:
        """Return the output, or its tangent, with the classes in the last dimension."""
        dims = output.dim()  # 1 for one example without a batch
        are_last = dims <= 1 or self.class_dim in (-1, dims - 1)
        return output if are_last else output.movedim(self.class_dim, -1)

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy; 0 if every target is ignored."""
        logits, classes = self._rows(to_working_dtype(output), target)
        with self.explaining_errors(output, target):
            total = F.cross_entropy(
                logits,
                classes,
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
                reduction="sum",  # torch's mean over no targets is NaN
            )
        return total / self.count(output, target)

    def _rows(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (rows, classes) and targets (rows,)."""
        output = self.classes_last(output)
        return output.reshape(-1, output.shape[-1]), target.reshape(-1).long()

    def _rows_with_tangent(
        self, output: Tensor, u: Tensor, target: Tensor, dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of logits, the tangent of the last rows, and the targets of all rows."""
        logits, tangent = self.classes_last(output), self.classes_last(u)
        if u.shape != output.shape:
            dim, class_dim = dim % output.dim(), self.class_dim % output.dim()
            # Move the batch to the front, so that u belongs to the last rows; the classes are now last.
            moved = (x.movedim(dim - (class_dim < dim), 0) for x in (logits, tangent, target))
            logits, tangent, target = moved
        if logits.dim() != 2:
            logits, tangent = (x.reshape(-1, logits.shape[-1]) for x in (logits, tangent))
            target = target.reshape(-1)
        return logits, tangent, target.long()

    def total_and_gradients(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, c: Coefficients, *, dim: int = 0
    ) -> TotalAndGradients | None:
        """Return the total and its gradients by the closed forms.

        Return None for "loss-jacobian", if the classes are not last, and if u belongs to a part of the
        batch and the batch is not in the first dimension.
        """
        batch_first = u.shape == output.shape or dim == 0
        if form == "loss-jacobian" or not batch_first or self.classes_last(output) is not output:
            return None
        try:  # the context explaining_errors would slow down small networks
            total, means, gradients = cross_entropy_and_gradients(
                output, u, target.long(), self._options(form, c)
            )
        except (IndexError, RuntimeError):
            self.check_values(output, target)
            raise
        return TotalAndGradients(total, means, *gradients)

    def by_class(self, output: Tensor, u: Tensor, target: Tensor) -> ByClass:
        """Return the parts of uᵀHu and tr H for each class, over the targets that count."""
        logits, u, target = self._rows_with_tangent(output, u, target, 0)
        counted = not_ignored(target, self.ignore_index)
        return softmax_by_class(logits[counted], u[counted], logits.shape[-1])

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return Σ ℓ_ŷ with ŷ ~ softmax(F), whose gradient p - 1_ŷ has covariance diag(p) - ppᵀ."""
        logits, target = self._rows(to_working_dtype(output), target)
        # Select rows by the target, since a label ŷ may be a class equal to ``ignore_index``.
        logits = logits[not_ignored(target, self.ignore_index)]
        return F.cross_entropy(logits, sample_classes(logits.detach(), generator), reduction="sum")

    def _probe(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        class_dim = self.class_dim if output.dim() > 1 else -1
        counted = not_ignored(target, self.ignore_index).unsqueeze(class_dim)
        return super()._probe(output * counted, target, generator)


@CONVERTERS.register(nn.CrossEntropyLoss)
def _convert(loss: nn.CrossEntropyLoss) -> CrossEntropy | None:
    if not is_plain_mean(loss):
        return None
    return CrossEntropy(
        ignore_index=loss.ignore_index, label_smoothing=loss.label_smoothing, class_dim=1
    )
