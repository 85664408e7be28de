"""The interface of a loss: ℓ, its quadratic form in the output tangent u, and ∂ℓ/∂ε.

All are *means over the same terms* (tokens, examples, elements: whatever the loss itself averages),
so the parts of an objective add up to its total.

``value``, ``count``, ``derivatives`` and ``combined`` read no values from the device: a training step
never waits for a GPU. ``check_values`` does read them.
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

_CHUNK = 1 << 22  # numbers in a chunk of rows


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
    logits_of: Callable[[Tensor], Tensor] = lambda rows: rows,
    tangents_of: Callable[[Tensor], Tensor] = lambda u: u,
) -> ByClass:
    """Return the sums for a softmax over rows of logits.

    The rows may also be features, from which two functions compute the logits and their u.
    """
    quadratic = torch.zeros(classes, dtype=torch.float64, device=rows.device)
    diagonal = torch.zeros_like(quadratic)
    size = max(1, _CHUNK // classes)
    for part, tangent in zip(rows.detach().split(size), u.detach().split(size), strict=True):
        p, tangent = torch.softmax(logits_of(part).double(), -1), tangents_of(tangent).double()
        v = tangent - (p * tangent).sum(-1, keepdim=True)
        quadratic += (p * v.square()).sum(0)
        diagonal += (p * (1.0 - p)).sum(0)
    return ByClass(quadratic, diagonal)


FORMS = ("hessian", "identity", "loss-jacobian")
"""The matrix of the quadratic form: H (the paper's R_approx), the identity, or the outer product of
the loss gradient at the true label with itself (R̃_approx)."""

ONES = Coefficients(1.0, 1.0, 1.0)


def precise(x: Tensor) -> Tensor:
    """Convert half precision to float32, which sums and means over terms need."""
    return x.to(working_dtype(x.dtype))


def count_tensor(n: int, like: Tensor) -> Tensor:
    """Return a count of terms, at least 1, as a 0-d tensor of a type that can represent it."""
    return torch.full((), max(n, 1), dtype=working_dtype(like.dtype), device=like.device)


def pad_tangent(u: Tensor, output: Tensor, dim: int) -> Tensor:
    """Return the tangent of the whole output: u for the last entries along ``dim``, 0 for the others."""
    if u.shape == output.shape:
        return u
    missing = list(output.shape)
    missing[dim] -= u.shape[dim]
    return torch.cat((u.new_zeros(missing), u), dim)


def last_entries(x: Tensor, u: Tensor, dim: int) -> Tensor:
    """Return the entries of x along ``dim`` that u belongs to: the last ones."""
    return x if u.shape == x.shape else x.narrow(dim, x.shape[dim] - u.shape[dim], u.shape[dim])


class TotalAndGradients(NamedTuple):
    """The total of a loss, and its gradients, without a graph."""

    total: Tensor
    means: Means  # without coefficients
    output_gradient: Tensor
    u_gradient: Tensor


class GivenLoss(ABC):
    """A loss as a user passes it: it turns a batch into inputs, targets and the loss for them."""

    def parameters(self) -> Sequence[Tensor]:
        """The weights in the loss, such as those of an output layer; the model may share them."""
        return ()

    @abstractmethod
    def prepare(self, model: nn.Module, inputs: Any, targets: Any) -> Batch:
        """Return the batch in the form that the loss takes; raise a ``DataError`` if it is empty."""


def split_labels(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return inputs and targets; if there are no targets, take ``labels`` from a dict of inputs.

    A batch whose first tensors are empty raises a ``DataError``.
    """
    if targets is None and isinstance(inputs, Mapping) and "labels" in inputs:
        targets = inputs["labels"]
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
    firsts = [t for tree in (inputs, targets) for t in islice(tensors_in(tree), 1)]
    if firsts and not any(t.numel() for t in firsts):
        shape = tuple(firsts[0].shape)
        raise DataError(f"the batch is empty (its first tensor has shape {shape}): skip it.")
    return inputs, targets


class Loss(GivenLoss):
    """A mean of per-term losses ℓ of a model output F, with its derivatives in F.

    A new loss is one subclass; every engine and objective works with it. ``derivatives`` must be
    differentiable (once) in ``output`` and ``u`` by plain reverse mode.

    A loss receives one tensor of what the model returns: the output itself, its ``logits``, or its
    first element.
    """

    whole_output: bool = False
    """Whether the loss receives everything that the model returns, e.g. for several heads.

    ``output`` is then whatever the model returns (a tuple, dict or object), and ``u`` has the same
    structure, with the tangent ∂/∂ε of every floating-point tensor in that tensor's place. The loss
    ignores the entries for other tensors. All tensors have the batch in ``dim``.
    """
    in_any_order: bool = False
    """Whether the loss stays the same if examples and targets are permuted in the same way."""
    computes_gradients: bool = False
    """Whether the loss implements ``total_and_gradients``, so the engine needs no graph for the loss.

    Such a loss receives one tensor, and stays the same if examples and targets are permuted in the
    same way.
    """
    has_side_effects: bool = False
    """Whether a call has side effects, for example because a trainer logs metrics in it. Then undrop
    skips the checks that would call the loss once more."""

    def select(self, output: Any) -> Any:
        """Return the part of the model's output that the loss receives."""
        return output if self.whole_output else logits_of(output)

    def prepare(self, model: nn.Module, inputs: Any, targets: Any) -> Batch:
        """Return the batch with this loss."""
        return Batch(model, *split_labels(inputs, targets), loss=self)

    def keep_state(self) -> AbstractContextManager[None]:
        """Return a context that restores the random state and the buffers of the loss at its end."""
        return nullcontext()

    @abstractmethod
    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise ``TargetError`` if the target's shape or type does not fit; reads no values."""

    def check_values(self, output: Tensor, target: Tensor) -> None:
        """Raise ``TargetError`` if a value of the target is out of range; waits for the device."""
        return None

    @contextmanager
    def explaining_errors(self, output: Tensor, target: Tensor) -> Iterator[None]:
        """Turn torch's error about an index out of range into a ``TargetError`` that names the index."""
        try:
            yield
        except (IndexError, RuntimeError):
            self.check_values(output, target)
            raise

    @abstractmethod
    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """N, the number of terms that the mean is over (at least 1), as a 0-d float tensor.

        In float32 at least: bfloat16 can't count beyond 256.
        """

    @abstractmethod
    def value(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean ℓ; the reverse engine differentiates it twice."""

    @abstractmethod
    def _derivatives(self, output: Tensor, u: Tensor, target: Tensor, form: str) -> Derivatives:
        """Like ``derivatives``, but only for "hessian" and "identity", with u of the output's shape."""

    def _derivatives_of_part(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, dim: int
    ) -> Derivatives:
        """Like ``_derivatives``, but u may belong only to the last entries along ``dim``."""
        return self._derivatives(output, pad_tangent(u, output, dim), target, form)

    def derivatives(
        self, output: Tensor, u: Tensor, target: Tensor, form: str = "hessian", *, dim: int = 0
    ) -> Derivatives:
        """ℓ, the quadratic form in u, and ∂ℓ/∂ε, as means over the terms.

        For the form "loss-jacobian" the square is that of the sum over terms, N·(mean ∂ℓ/∂ε)². Its
        expectation over η is Σ_i σ_i² ‖D(ℓ∘F_i)[h_i] ⊙ h_i‖², whichever entries share an η.

        Args:
            output: F.
            u: ∂F/∂ε. It may have fewer entries than F along ``dim``: then it belongs to the last
                ones, and u = 0 for the others. The means are over all terms.
            target: what the loss compares F with.
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
        coefficients: Coefficients | tuple[float, float, float] = ONES,
        *,
        dim: int = 0,
    ) -> tuple[Tensor, Derivatives]:
        """The total c₀·ℓ + c₁·quadratic + c₂·directional, and its parts without coefficients or graph.

        The other arguments are those of ``derivatives``.
        """
        return self._total_and_parts(output, u, target, form, Coefficients(*coefficients), dim)

    def _total_and_parts(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, c: Coefficients, dim: int
    ) -> tuple[Tensor, Derivatives]:
        """Compute what ``combined`` returns.

        A loss that forms its gradient in the forward pass overrides this. It may skip a part whose
        coefficient is 0, and report 0 for it.
        """
        parts = self.derivatives(output, u, target, form, dim=dim)
        return c.total(parts), Derivatives(*(part.detach() for part in parts))

    def total_and_gradients(
        self,
        output: Tensor,
        u: Tensor,
        target: Tensor,
        form: str,
        coefficients: Coefficients,
        *,
        dim: int = 0,
    ) -> TotalAndGradients | None:
        """Return the total of ``combined`` and its gradients; None if autograd must compute them.

        Only a loss with ``computes_gradients`` has it.
        """
        return None

    def by_class(self, output: Tensor, u: Tensor, target: Tensor) -> ByClass | None:
        """How uᵀHu splits over classes, for a diagnosis; None for an output without classes."""
        return None

    def sampled(
        self, output: Tensor, target: Tensor, form: str, generator: torch.Generator | None
    ) -> Tensor:
        """A scalar S, in general random, with E[∇S ∇Sᵀ] = Σ_terms H (or the requested form).

        For "hessian" S = Σ ℓ_ŷ with labels drawn from the model, ŷ ~ p (the paper's Algorithm 3;
        the sampling probabilities are not differentiated); for "identity" S = ⟨v, F⟩ with random
        signs v; for "loss-jacobian" the total loss itself.
        """
        if form == "loss-jacobian":
            return self.value(output, target) * self.count(output, target)
        if form == "identity":
            return self._probe(output, target, generator)
        return self._sampled(output, target, generator)

    def _probe(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        signs = torch.empty_like(output).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        return (signs * output).sum()

    def _sampled(self, output: Tensor, target: Tensor, generator: torch.Generator | None) -> Tensor:
        raise EngineError(
            f"{type(self).__name__} has no distribution to sample labels from, which the reverse "
            "engine needs: use engine='tangent', 'antithetic' or 'exact'."
        )


class ClosedForm(Loss):
    """A loss whose formulas skip the entries without u, in ``_derivatives_of_part``."""

    in_any_order = True

    def _derivatives(self, output: Tensor, u: Tensor, target: Tensor, form: str) -> Derivatives:
        return self._derivatives_of_part(output, u, target, form, 0)

    @abstractmethod
    def _derivatives_of_part(
        self, output: Tensor, u: Tensor, target: Tensor, form: str, dim: int
    ) -> Derivatives: ...


CONVERTERS: Registry[type, Callable[[Any], Loss | None]] = Registry("torch loss")
"""From the class of a torch loss to a function that makes the ``Loss`` for an instance.

It returns None for an instance with options that the ``Loss`` does not have.
"""


def is_plain_mean(loss: Any) -> bool:
    """Whether a torch loss module averages all its terms with equal weights."""
    return loss.reduction == "mean" and getattr(loss, "weight", None) is None
