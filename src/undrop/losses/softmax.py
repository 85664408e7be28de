"""The base class of all softmax losses, and losses on features, which contain the output layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from undrop.errors import OptionError, OutputError
from undrop.kernels.adaptive import AdaptiveOutput, Layer
from undrop.kernels.output_layers import LinearOutput, OutputLayer, row_chunks
from undrop.kernels.softmax import Coefficients, Derivatives, SoftmaxOptions, working_dtype
from undrop.losses.base import ByClass, ClosedForm, softmax_by_class, to_working_dtype
from undrop.losses.targets import check_class_indices, check_class_range, not_ignored


class SoftmaxLoss(ClosedForm):
    """The mean over targets of -log p(y), where p is a softmax of the logits that ``layer`` computes.

    Targets equal to ``ignore_index`` do not count. With label smoothing α in [0, 1), the target is
    (1-α)·1_y + α/C.
    """

    def __init__(self, layer: OutputLayer, ignore_index: int, label_smoothing: float) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise OptionError(f"label_smoothing must lie in [0, 1), got {label_smoothing}.")
        self.layer = layer
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def parameters(self) -> Sequence[Tensor]:
        """Return the parameters of the output layer."""
        return [p for p in self.layer.parameters if p is not None]

    @abstractmethod
    def _shape(self, output: Tensor) -> tuple[int, ...]:
        """Return the shape of all logits, with the classes last."""

    def check(self, output: Tensor, target: Tensor) -> None:
        """Check that targets are class indices, one for each row of logits."""
        *rows, classes = self._shape(output)
        check_class_indices(target, rows, classes)

    def check_values(self, output: Tensor, target: Tensor) -> None:
        """Check that every target is an existing class or ``ignore_index``."""
        check_class_range(target, self._shape(output)[-1], self.ignore_index)

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the number of targets that are not ignored, at least 1."""
        n = not_ignored(target, self.ignore_index).sum().clamp(min=1)
        return n.to(working_dtype(output.dtype))

    def _options(self, form: str, coefficients: Coefficients | None = None) -> SoftmaxOptions:
        return SoftmaxOptions(self.label_smoothing, form, coefficients, self.ignore_index)

    def _rows_with_tangent(
        self, output: Tensor, u: Tensor, target: Tensor, dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of the output, the tangent of the last rows, and the targets of all rows."""
        if u.shape == output.shape:
            return output, u, target
        dim %= output.dim()
        return output.movedim(dim, 0), u.movedim(dim, 0), target.movedim(dim, 0)

    def _derivatives_of_part(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, dim: int
    ) -> Derivatives:
        rows = self._rows_with_tangent(output, u, target, dim)
        with self.explaining_errors(output, target):
            return self.layer.derivatives(*rows, self._options(form))

    def _combined(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, c: Coefficients, dim: int
    ) -> tuple[Tensor, Derivatives]:
        """Compute the total and its gradient in the same sweep over the rows."""
        if form == "loss-jacobian":
            return super()._combined(output, u, target, form, c, dim)
        rows = self._rows_with_tangent(output, u, target, dim)
        with self.explaining_errors(output, target):
            return self.layer.combined(*rows, self._options(form, c))


class FeatureLoss(SoftmaxLoss):
    """The mean over tokens of -log p(y | f), for features f (…, d) and class indices (…)."""

    def __init__(self, layer: OutputLayer, ignore_index: int, label_smoothing: float = 0.0) -> None:
        super().__init__(layer, ignore_index, label_smoothing)
        if layer.chunk is not None and layer.chunk < 1:
            raise OptionError(f"chunk must be at least 1 row, got {layer.chunk}.")

    def _shape(self, output: Tensor) -> tuple[int, ...]:
        return (*output.shape[:-1], self.layer.num_classes)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Check the width of the features, and that targets are class indices, one for each row."""
        width = self.layer.width
        if output.shape[-1] != width:
            raise OutputError(
                f"the output layer of the loss takes features of width {width}, got an output of "
                f"shape {tuple(output.shape)}: let the model return features, not logits."
            )
        super().check(output, target)

    def _counted_rows(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the features whose targets are not ignored, as rows."""
        counted = not_ignored(target, self.ignore_index).reshape(-1)
        return output.reshape(-1, self.layer.width)[counted]

    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean of -log p(y | f); 0 if every target is ignored."""
        with self.explaining_errors(output, target):
            return self.layer.loss(output, target, self._options("hessian"))

    @abstractmethod
    def _logits(self, features: Tensor) -> Tensor:
        """Return all logits of some rows."""

    @abstractmethod
    def _sample_labels(self, features: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return a label for each row, drawn from the model."""

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return Σ ℓ_ŷ with ŷ drawn from the model, a chunk of rows at a time."""
        rows = self._counted_rows(output, target)
        labels = torch.empty(len(rows), dtype=torch.long, device=rows.device)
        with torch.no_grad():
            for chunk in row_chunks(len(rows), self.layer.softmax_size, self.layer.chunk):
                labels[chunk] = self._sample_labels(rows[chunk], generator)
        # -1 ignores no row: a label may be a class equal to ``ignore_index``.
        mean = self.layer.loss(rows, labels, SoftmaxOptions(ignore_index=-1))
        return mean * self.count(output, target)

    def _probe(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return ⟨v, z⟩ with random signs v on all logits z, as in ``CrossEntropy``."""
        logits = self._logits(self._counted_rows(output, target))
        return super()._probe(logits, target, generator)


def sample_classes(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a class for each row of logits, drawn from its softmax."""
    p = torch.softmax(to_working_dtype(logits), -1)
    return torch.multinomial(p, 1, generator=generator).squeeze(-1)


class LinearCrossEntropy(FeatureLoss):
    """``CrossEntropy`` on the logits ``W f + b`` of features f (…, d), without all logits in memory.

    Logits exist for one chunk of rows at a time. Each chunk is computed, overwritten by its gradients,
    and backpropagated to f, W and b, so memory does not grow as rows × classes. Only the reverse engine,
    which differentiates twice, keeps all logits.

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
        super().__init__(LinearOutput(weight, bias, chunk), ignore_index, label_smoothing)
        self.weight, self.bias = weight, bias

    def by_class(self, output: Tensor, u: Tensor, target: Tensor) -> ByClass:
        """Return the parts of uᵀHu and tr H for each class, computed for a chunk of rows at a time."""
        return softmax_by_class(
            self._counted_rows(output, target),
            self._counted_rows(u, target),
            self.layer.num_classes,
            self._logits,
            lambda tangents: F.linear(tangents, self.weight),
        )

    def _logits(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight, self.bias)

    def _sample_labels(self, features: Tensor, generator: torch.Generator | None) -> Tensor:
        return sample_classes(self._logits(features), generator)


class AdaptiveSoftmax(FeatureLoss):
    """ℓ = -log p(y | f) of ``torch.nn.AdaptiveLogSoftmaxWithLoss``, on features f (…, d).

    The head is a softmax over the shortlist and one class for each tail c, of probability π_c. Each
    tail has a softmax over its words. The quadratic form is the Fisher form, the mean over labels of
    the second derivative: ``uᵀHu = Var_head + Σ_c π_c Var_c``, where Var is the variance of the
    logits' tangent under a softmax. The form "identity" is the squared norm of that tangent, over
    all logits.

    Args:
        head_weight: (shortlist + tails, d).
        head_bias: (shortlist + tails,), or None.
        tails: for each tail a projection (d_c, d) or None, a weight (words, d_c), and a bias (words,)
            or None.
        cutoffs: the first word of each tail.
        ignore_index: targets of this value do not count.
        chunk: rows at a time; None chooses by the number of classes.
    """

    layer: AdaptiveOutput

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
        layer = AdaptiveOutput(head, [Layer(*tail) for tail in tails], cutoffs, chunk)
        super().__init__(layer, ignore_index)

    def _sample_labels(self, features: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draw a class of the head, and if that is a tail, a word of *that* tail."""
        head, *tails = self.layer.layers(self.layer.parameters)
        labels = sample_classes(head.logits(features), generator)
        sampled_tails = labels - self.layer.shortlist
        for number, (tail, words) in enumerate(zip(tails, self.layer.tails, strict=True)):
            in_tail = sampled_tails == number
            if bool(in_tail.any()):
                words_in_tail = sample_classes(tail.logits(features[in_tail]), generator)
                labels[in_tail] = words.start + words_in_tail
        return labels

    def _logits(self, features: Tensor) -> Tensor:
        """Return all logits, of the head and of every tail."""
        layers = self.layer.layers(self.layer.parameters)
        return torch.cat([layer.logits(features) for layer in layers], -1)


def _check_sizes(head: Tensor, tails: Sequence[Tensor], cutoffs: Sequence[int]) -> None:
    """Raise an ``OptionError`` if the sizes of the weights do not fit the cutoffs."""
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
            f"{words} words plus a last one of any size, got {len(head)} and {sizes}."
        )
