"""The interface of a loss: ℓ, its quadratic form in the output tangent u, and ∂ℓ/∂ε.

ε scales the noise, and u = ∂F/∂ε is the tangent of the model's output F. All three results are *means
over the same terms* (the tokens, examples or elements that the loss itself averages), so the parts of an
objective add up to its total.

``value``, ``count``, ``derivatives`` and ``combined`` read no values from the device, so a training step
never waits for a GPU. There are two exceptions: ``Generic`` reads values when it first computes
derivatives, and ``AdaptiveSoftmax`` reads how many rows each tail has. ``check_values`` also reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrop.errors import DataError, EngineError, OptionError
from undrop.intercept.model_call import Batch, logits_of, tensors_in
from undrop.kernels.softmax import Coefficients, Derivatives, Means, working_dtype
from undrop.registry import Registry

_CHUNK_ELEMENTS = 1 << 22  # numbers in a chunk of rows


class ByClass(NamedTuple):
    """One number per class, summed over the terms of the loss, in float64."""

    quadratic: Tensor
    """The part of uᵀHu that belongs to each class."""
    diagonal: Tensor
    """The part of tr H that belongs to each class."""


@torch.no_grad()
def softmax_by_class(
    rows: Tensor,
    u: Tensor,
    classes: int,
    layer: Callable[[Tensor], Tensor] = lambda rows: rows,
    layer_tangent: Callable[[Tensor], Tensor] = lambda u: u,
) -> ByClass:
    """Return the parts of uᵀHu and tr H for each class, from rows of logits and their tangent u.

    If the rows are features, ``layer`` computes the logits from them, and ``layer_tangent`` the tangent
    of the logits from that of the features.
    """
    quadratic = torch.zeros(classes, dtype=torch.float64, device=rows.device)
    diagonal = torch.zeros_like(quadratic)
    size = max(1, _CHUNK_ELEMENTS // classes)
    for chunk, u_chunk in zip(rows.detach().split(size), u.detach().split(size), strict=True):
        p, tangent = torch.softmax(layer(chunk).double(), -1), layer_tangent(u_chunk).double()
        v = tangent - (p * tangent).sum(-1, keepdim=True)  # v = u - Σ p u
        quadratic += (p * v.square()).sum(0)  # uᵀHu = Σ p v²
        diagonal += (p * (1.0 - p)).sum(0)  # tr H = Σ p(1 - p)
    return ByClass(quadratic, diagonal)


FORMS = ("hessian", "identity", "loss-jacobian")
"""The matrix M of the quadratic form uᵀMu/N, where N is the number of terms: the Hessian of the loss
summed over its terms (for the paper's R_approx), the identity, or g gᵀ, where g is the gradient of this
sum (for R̃_approx)."""

_ONES = Coefficients(1.0, 1.0, 1.0)


def to_working_dtype(x: Tensor) -> Tensor:
    """Convert half precision to float32: sums and means over many terms need the precision."""
    return x.to(working_dtype(x.dtype))


def count_tensor(n: int, like: Tensor) -> Tensor:
    """Return max(n, 1) as a 0-d tensor of a dtype that can represent it."""
    return torch.full((), max(n, 1), dtype=working_dtype(like.dtype), device=like.device)


def pad_tangent(u: Tensor, output: Tensor, dim: int) -> Tensor:
    """Return the tangent of the whole output: u for the last entries along ``dim``, 0 for the others."""
    if u.shape == output.shape:
        return u
    zeros_shape = list(output.shape)
    zeros_shape[dim] -= u.shape[dim]
    return torch.cat((u.new_zeros(zeros_shape), u), dim)


def entries_with_tangent(x: Tensor, u: Tensor, dim: int) -> Tensor:
    """Return the entries of x that have a tangent in u: the last ones along ``dim``."""
    return x if u.shape == x.shape else x.narrow(dim, x.shape[dim] - u.shape[dim], u.shape[dim])


class TotalAndGradients(NamedTuple):
    """The weighted total c₀·ℓ + c₁·quadratic + c₂·directional, its three means, and its gradients.

    None of them has a graph.
    """

    total: Tensor
    means: Means  # of ℓ, the quadratic form and ∂ℓ/∂ε, without coefficients
    output_gradient: Tensor
    u_gradient: Tensor


class GivenLoss(ABC):
    """The internal form of the option ``loss=``: a fixed loss, or a rule that chooses one per model."""

    def parameters(self) -> Sequence[Tensor]:
        """Return the trainable parameters of the loss, e.g. a head's; the model may share them."""
        return ()

    @abstractmethod
    def prepare(self, model: nn.Module, inputs: Any, targets: Any) -> Batch:
        """Return the batch with its loss; raise a ``DataError`` if the batch is empty."""


def split_labels(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return inputs and targets; if there are no targets, take ``labels`` out of a dict of inputs.

    Raise a ``DataError`` if neither the first tensor of the inputs nor that of the targets has elements.
    """
    if targets is None and isinstance(inputs, Mapping) and "labels" in inputs:
        targets = inputs["labels"]
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
    first_tensors = [t for tree in (inputs, targets) for t in islice(tensors_in(tree), 1)]
    if first_tensors and not any(t.numel() for t in first_tensors):
        shape = tuple(first_tensors[0].shape)
        raise DataError(f"the batch is empty (its first tensor has shape {shape}): skip it.")
    return inputs, targets


class Loss(GivenLoss):
    """A loss ℓ of a model output F, the mean of per-term losses ℓᵢ, with its derivatives in F.

    A new loss is one subclass; every engine and objective works with it. The results of
    ``derivatives`` must be differentiable (once) in ``output`` and ``u`` by plain reverse mode.

    Unless ``whole_output`` is set, a loss receives one tensor: the model's output itself, the ``logits``
    in it, or its first element.
    """

    whole_output: bool = False
    """Whether the loss receives everything that the model returns, for example for several heads.

    ``output`` is then a tuple, dict or object, and ``u`` has the same structure, with the tangent of
    every floating-point tensor in place of the tensor. The loss ignores the entries of ``u`` for tensors
    that are not floating-point. All tensors have the batch in the same dimension.
    """
    in_any_order: bool = False
    """Whether the order of the examples does not matter: the loss stays the same if the output and the
    targets are permuted in the same way."""
    computes_gradients: bool = False
    """Whether the loss implements ``total_and_gradients``, so the engine needs no graph for the loss.

    Such a loss must receive one tensor and must set ``in_any_order``.
    """
    has_side_effects: bool = False
    """Whether calling the loss does more than compute it, such as logging metrics. Then undrop
    skips the checks that would call it once more."""

    def select(self, output: Any) -> Any:
        """Return the tensor of the model's output that the loss receives, or the whole output."""
        return output if self.whole_output else logits_of(output)

    def prepare(self, model: nn.Module, inputs: Any, targets: Any) -> Batch:
        """Return the batch with this loss."""
        return Batch(model, *split_labels(inputs, targets), loss=self)

    def keep_state(self) -> AbstractContextManager[None]:
        """Return a context that restores the random state and the loss's buffers when it ends."""
        return nullcontext()

    @abstractmethod
    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise a ``TargetError`` if the target's shape or type does not fit, without reading values."""

    def check_values(self, output: Tensor, target: Tensor) -> None:
        """Raise a ``TargetError`` if a value of the target is out of range; waits for the device."""
        return None

    @contextmanager
    def explaining_errors(self, output: Tensor, target: Tensor) -> Iterator[None]:
        """Replace torch's error for a class out of range by a ``TargetError`` that names the class."""
        try:
            yield
        except (IndexError, RuntimeError):
            self.check_values(output, target)
            raise

    @abstractmethod
    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """Return N, the number of terms in the mean (at least 1), as a 0-d floating-point tensor.

        Its dtype is at least float32, because bfloat16 can't count beyond 256.
        """

    @abstractmethod
    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean ℓ, which must be twice differentiable for the reverse engine."""

    @abstractmethod
    def _derivatives(self, output: Tensor, u: Tensor, target: Tensor, form: str) -> Derivatives:
        """Return ``derivatives`` for the form "hessian" or "identity"; u has the shape of the output."""

    def _derivatives_of_part(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, dim: int
    ) -> Derivatives:
        """Return ``_derivatives`` for a u that may belong to the last entries along ``dim`` only."""
        return self._derivatives(output, pad_tangent(u, output, dim), target, form)

    def derivatives(
        self, output: Tensor, u: Tensor, target: Tensor, form: str = "hessian", *, dim: int = 0
    ) -> Derivatives:
        """Return ℓ, the quadratic form in u, and ∂ℓ/∂ε (``directional``), as means over the terms.

        The form "loss-jacobian" is the squared sum of ∂ℓᵢ/∂ε over the N terms, divided by N:
        N·(mean ∂ℓᵢ/∂ε)². Its expectation over η is the paper's R̃_approx (eq. 5.1).

        Args:
            output: F.
            u: ∂F/∂ε. If it has fewer entries than F along ``dim``, it is the tangent of the last ones,
                and 0 for the others. The means are over all terms.
            target: the targets of the batch, as the loss takes them.
            form: one of ``FORMS``.
            dim: the batch dimension of F.
        """
        if form not in FORMS:
            raise OptionError(f"there is no quadratic form {form!r}: use {', '.join(FORMS)}.")
        if form != "loss-jacobian":
            return self._derivatives_of_part(output, u, target, form, dim)
        parts = self._derivatives_of_part(output, u, target, "hessian", dim)
        n = self.count(output, target)
        return parts._replace(quadratic=n * parts.directional.square())

    def combined(
        self,
        output: Tensor,
        u: Tensor,
        target: Tensor,
        form: str = "hessian",
        coefficients: Coefficients | tuple[float, float, float] = _ONES,
        *,
        dim: int = 0,
    ) -> tuple[Tensor, Derivatives]:
        """Return the total c₀·ℓ + c₁·quadratic + c₂·directional, and its three parts.

        The parts have no coefficients and no graph. All arguments but ``coefficients`` are those of
        ``derivatives``.
        """
        return self._combined(output, u, target, form, Coefficients(*coefficients), dim)

    def _combined(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, c: Coefficients, dim: int
    ) -> tuple[Tensor, Derivatives]:
        """Return the result of ``combined``.

        A loss that computes its gradient in the forward pass overrides this method. It may skip a part
        whose coefficient is 0, and return 0 for it.
        """
        parts = self.derivatives(output, u, target, form, dim=dim)
        return c.total(parts), Derivatives(*(part.detach() for part in parts))

    def total_and_gradients(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, c: Coefficients, *, dim: int = 0
    ) -> TotalAndGradients | None:
        """Return the total of ``combined`` and its gradients; None if autograd must compute them.

        c are the coefficients. A loss with ``computes_gradients`` implements this method.
        """
        return None

    def by_class(self, output: Tensor, u: Tensor, target: Tensor) -> ByClass | None:
        """Return the parts of uᵀHu and tr H for each class; None for an output without classes."""
        return None

    def sampled(
        self, output: Tensor, target: Tensor, form: str, generator: torch.Generator | None
    ) -> Tensor:
        """Return a scalar S, usually random, such that E[∇S ∇Sᵀ] is the matrix of the form (``FORMS``).

        For "hessian", S = Σ ℓ_ŷ with labels drawn from the model, ŷ ~ p (the paper's Algorithm 3; the
        sampling probabilities are not differentiated). For "identity", S = ⟨v, F⟩ with random signs v.
        For "loss-jacobian", S is the sum of the loss over its terms.
        """
        if form == "loss-jacobian":
            return self.value(output, target) * self.count(output, target)
        if form == "identity":
            return self._probe(output, target, generator)
        return self._sampled(output, target, generator)

    def _probe(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return ⟨v, F⟩ with random signs v."""
        signs = torch.empty_like(output).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        return (signs * output).sum()

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return Σ ℓ_ŷ with labels ŷ drawn from the model."""
        raise EngineError(
            f"{type(self).__name__} has no distribution to sample labels from, which the reverse "
            "engine needs: use engine='tangent', 'antithetic' or 'exact'."
        )


class ClosedForm(Loss):
    """A loss that handles a u for the last entries directly, without padding it with zeros."""

    in_any_order = True

    def _derivatives(self, output: Tensor, u: Tensor, target: Tensor, form: str) -> Derivatives:
        return self._derivatives_of_part(output, u, target, form, 0)

    @abstractmethod
    def _derivatives_of_part(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, dim: int
    ) -> Derivatives: ...


CONVERTERS: Registry[type, Callable[[Any], Loss | None]] = Registry("torch loss")
"""The class of a torch loss → a function that returns the ``Loss`` for an instance of that class.

The function returns None for an instance with options that no ``Loss`` has.
"""


def is_plain_mean(loss: Any) -> bool:
    """Return whether a torch loss module averages all its terms with equal weights."""
    return loss.reduction == "mean" and getattr(loss, "weight", None) is None
