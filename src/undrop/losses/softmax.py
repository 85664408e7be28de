"""The common part of losses with a softmax: on logits, or on features with the output layer inside."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from undrop.errors import OptionError, OutputError
from undrop.kernels.output_layers import Output
from undrop.kernels.softmax import Coefficients, SoftmaxOptions, working_dtype
from undrop.losses.base import ClosedForm, Derivatives
from undrop.losses.targets import check_class_indices, check_class_range, not_ignored


class SoftmaxLoss(ClosedForm):
    """The mean over targets of -log p(y), where p is a softmax.

    Args:
        layer: makes logits of the output.
        ignore_index: targets of this value do not count.
        label_smoothing: α in [0, 1): the target is (1-α)·1_y + α/C.
    """

    def __init__(self, layer: Output, ignore_index: int, label_smoothing: float) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise OptionError(f"label_smoothing must lie in [0, 1), got {label_smoothing}.")
        self.layer = layer
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def parameters(self) -> Sequence[Tensor]:
        """The parameters of the output layer."""
        return [p for p in self.layer.parameters if p is not None]

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """The number of targets that are not ignored."""
        kept = not_ignored(target, self.ignore_index).sum().clamp(min=1)
        return kept.to(working_dtype(output.dtype))

    def _options(self, form: str, coefficients: Coefficients | None = None) -> SoftmaxOptions:
        return SoftmaxOptions(
            self.label_smoothing, form, coefficients, ignore_index=self.ignore_index
        )

    def _paired(
        self, output: Tensor, u: Tensor, target: Tensor, dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the output, the tangent of the last of them, and their targets."""
        if u.shape == output.shape:
            return output, u, target
        dim %= output.dim()
        return output.movedim(dim, 0), u.movedim(dim, 0), target.movedim(dim, 0)

    def _derivatives_of_part(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, dim: int
    ) -> Derivatives:
        rows = self._paired(output, u, target, dim)
        with self.explaining_errors(output, target):
            return Derivatives(*self.layer.derivatives(*rows, self._options(form)))

    def _combined(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, c: Coefficients, dim: int
    ) -> tuple[Tensor, Derivatives]:
        """The total, with its gradient formed in the same sweep over the rows."""
        if form == "loss-jacobian":
            return super()._combined(output, u, target, form, c, dim)
        rows = self._paired(output, u, target, dim)
        with self.explaining_errors(output, target):
            total, parts = self.layer.combined(*rows, self._options(form, c))
        return total, Derivatives(*parts)


class FeatureLoss(SoftmaxLoss):
    """The mean over tokens of -log p(y | f), for features f (…, d) and class indices (…).

    Args:
        layer: the output layer with its loss.
        width: d.
        classes: the number of classes.
        ignore_index: targets of this value do not count.
        label_smoothing: α in [0, 1): the target is (1-α)·1_y + α/C.
    """

    def __init__(
        self,
        layer: Output,
        *,
        width: int,
        classes: int,
        ignore_index: int,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(layer, ignore_index, label_smoothing)
        if layer.chunk is not None and layer.chunk < 1:
            raise OptionError(f"chunk must be at least 1 row, got {layer.chunk}.")
        self.width, self.classes, self.chunk = width, classes, layer.chunk

    def check(self, output: Tensor, target: Tensor) -> None:
        """Check that targets are class indices, one for each row of features."""
        if output.shape[-1] != self.width:
            raise OutputError(
                f"the loss takes features of width {self.width}, that of its output layer, got an "
                f"output of shape {tuple(output.shape)}: let the model return features, not logits."
            )
        check_class_indices(target, tuple(output.shape[:-1]), self.classes)

    def check_values(self, output: Tensor, target: Tensor) -> None:
        """Check that every target is an existing class or ``ignore_index``."""
        check_class_range(target, self.classes, self.ignore_index)

    def _kept(self, output: Tensor, target: Tensor) -> Tensor:
        """The features of the targets that are not ignored, as rows."""
        return output.reshape(-1, self.width)[not_ignored(target, self.ignore_index).reshape(-1)]

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean of -log p(y | f); 0 if every target is ignored."""
        with self.explaining_errors(output, target):
            return self.layer.loss(output, target, self._options("hessian"))
