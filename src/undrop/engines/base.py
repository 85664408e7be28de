"""What an engine receives, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from undrop.engines.draw import HALF, Draw
from undrop.engines.layout import Layout
from undrop.errors import EngineError, NoDropoutError
from undrop.intercept import Batch, tensors_in
from undrop.losses import Coefficients, Loss
from undrop.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to compute c₀·ℓ + c₁·uᵀHu + c₂·∂ℓ/∂ε on one batch, for one draw of η."""

    batch: Batch
    """The model, the data, and the loss."""
    draw: Draw
    """The draw of η."""
    coefficients: Coefficients
    form: str = "hessian"
    """The quadratic form of the explicit part: "hessian", "identity" or "loss-jacobian"."""
    fraction: float = 1.0
    """ρ: the share of the batch that carries noise."""
    batch_dim: int | None = None
    """The batch dimension of the targets; None to find it."""
    exact_output: bool = False
    """Whether to evaluate ℓ at the exact output without noise instead of at the midpoint of ±ε₀."""

    @property
    def loss(self) -> Loss:
        """The loss of the batch."""
        loss: Loss = self.batch.loss
        return loss

    @cached_property
    def plan_key(self) -> tuple[Any, ...]:
        """Everything that a plan for a stacked pass depends on, except the model."""
        tensors = [*tensors_in(self.batch.inputs), *tensors_in(self.batch.targets)]
        autocast = torch.is_autocast_enabled(tensors[0].device.type if tensors else "cpu")
        options = (self.fraction, self.batch_dim, self.exact_output, autocast)
        return (*options, *(t.shape for t in tensors))

    def layout(self, dim: int, *, shared: bool = False) -> Layout:
        """Return the layout of the stacked batch.

        Dimension ``dim`` of the first target (of the first input if there are no targets) is the batch.
        ``shared`` says whether all examples share the noise of some site.
        """
        first = next(chain(tensors_in(self.batch.targets), tensors_in(self.batch.inputs)))
        return Layout.of(first.shape[dim], self.fraction, self.exact_output, shared)

    @cached_property
    def half_precision(self) -> bool:
        """Whether the model runs in half precision, by its weights or by autocast."""
        weights = (p for m in self.batch.model.modules() for p in m._parameters.values())
        first = next((p for p in weights if p is not None and p.is_floating_point()), None)
        if first is None:
            return False
        return first.dtype in HALF or torch.is_autocast_enabled(first.device.type)

    def run(self) -> tuple[Any, Any]:
        """Run the model; return its output, and F: the part of the output that the loss receives."""
        output = self.batch.forward()
        if not self.draw.reached_site:
            raise self.no_dropout_error()
        f = self.loss.select(output)
        self.loss.check(f, self.batch.targets)
        return output, f

    def evaluation(self, f: Any, u: Any, make_output: Callable[[], Any], engine: str) -> Evaluation:
        """Return c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε and its parts, from F and u."""
        c, targets = self.coefficients, self.batch.targets
        total, parts = self.loss.combined(f, u, targets, self.form, c)
        return Evaluation(total, WeightedParts(c, parts), make_output, engine)

    def no_dropout_error(self) -> NoDropoutError:
        """Return the error for a pass without an active dropout."""
        return NoDropoutError(
            f"no active dropout runs in this pass of {type(self.batch.model).__name__}: check that "
            "p > 0 and that its dropout modules are in train mode."
        )


@dataclass
class Evaluation:
    """A scalar to differentiate, and its parts."""

    total: Tensor
    """The scalar, with a graph."""
    parts: Mapping[str, Tensor]
    """The parts by name, times their coefficients and without a graph; they add up to the total."""
    make_output: Callable[[], Any]
    """Computes ``output``."""
    engine: str = ""
    """The engine that computed the total, and why it was chosen."""
    last: bool = False
    """Whether this is the last evaluation of the step."""

    @cached_property
    def output(self) -> Any:
        """The model's output at ε = 0, in the order of the batch; computed when it is first read."""
        return self.make_output()


class Engine(ABC):
    """A way to compute the output tangent u = ∂F/∂ε, or the regularizers without it."""

    name: ClassVar[str]

    @abstractmethod
    def evaluate(self, request: Request) -> Evaluation:
        """Return c₀ℓ + c₁uᵀHu + c₂∂ℓ/∂ε with a graph, and its parts."""


ENGINES: Registry[str, Callable[[], Engine]] = Registry("engine")
"""Engines by name."""


def as_engine(engine: str | Engine) -> Engine:
    """Return an engine by its name, or the engine itself; an unknown name raises an error."""
    return engine if isinstance(engine, Engine) else ENGINES[engine]()


def refuse_fraction(engine: Engine, request: Request) -> None:
    """Raise an ``EngineError`` if ``fraction`` < 1, which only the antithetic engine supports."""
    if request.fraction < 1.0:
        raise EngineError(
            f"fraction < 1 is for the antithetic engine, got the {engine.name} engine: use "
            "engine='antithetic', or fraction=1."
        )


class WeightedParts(Mapping[str, Tensor]):
    """The parts by name, each times its coefficient; a part with the coefficient 0 is left out.

    A part is multiplied when it is read, because most training steps read none.

    Args:
        coefficients: the factors of ℓ, uᵀHu and ∂ℓ/∂ε.
        means: ℓ, uᵀHu and ∂ℓ/∂ε.
    """

    def __init__(self, coefficients: Coefficients, means: Iterable[Tensor]) -> None:
        self._means = {
            name: (c, mean.detach() if mean.requires_grad else mean)
            for name, c, mean in zip(PART_NAMES, coefficients, means, strict=True)
            if isinstance(c, Tensor) or c
        }

    def __getitem__(self, name: str) -> Tensor:
        c, mean = self._means[name]
        return mean if isinstance(c, float) and c == 1.0 else c * mean

    def __iter__(self) -> Iterator[str]:
        return iter(self._means)

    def __len__(self) -> int:
        return len(self._means)


PART_NAMES = ("loss", "explicit", "implicit")
