"""What an engine receives, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from undrop.engines.draw import Draw
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
    coefficients: Coefficients
    form: str = "hessian"
    """The quadratic form of the explicit part: "hessian", "identity" or "loss-jacobian"."""
    fraction: float = 1.0
    """ρ: the share of the batch that carries noise."""
    batch_dim: int | None = None
    """The dimension of the batch in the targets; None to find it."""
    exact_output: bool = False
    """Whether ℓ is evaluated at the output without noise, not at the midpoint of ±ε₀."""

    @property
    def loss(self) -> Loss:
        """The loss of the batch."""
        loss: Loss = self.batch.loss
        return loss

    @cached_property
    def plan_key(self) -> tuple[Any, ...]:
        """What a plan for a stacked pass depends on, besides the model."""
        tensors = [*tensors_in(self.batch.inputs), *tensors_in(self.batch.targets)]
        autocast = torch.is_autocast_enabled(tensors[0].device.type if tensors else "cpu")
        options = (self.fraction, self.batch_dim, self.exact_output, autocast)
        return (*options, *(t.shape for t in tensors))

    def layout(self, dim: int, *, shared: bool = False) -> Layout:
        """Return the layout for the batch in dimension ``dim`` of the first target (or input).

        ``shared`` says whether all examples share the noise of some site.
        """
        first = next(chain(tensors_in(self.batch.targets), tensors_in(self.batch.inputs)))
        return Layout.of(first.shape[dim], self.fraction, self.exact_output, shared)

    @cached_property
    def half_precision(self) -> bool:
        """Whether the model runs in half precision, by its weights or by autocast."""
        every = (p for m in self.batch.model.modules() for p in m._parameters.values())
        weight = next((p for p in every if p is not None and p.is_floating_point()), None)
        if weight is None:
            return False
        half = weight.dtype in (torch.float16, torch.bfloat16)
        return half or torch.is_autocast_enabled(weight.device.type)

    def run(self) -> tuple[Any, Any]:
        """Run the model; return its output, and the checked part of it that the loss receives."""
        output = self.batch.forward()
        if not self.draw.reached_site:
            raise NoDropoutError(no_active_dropout(self.batch.model))
        seen = self.loss.select(output)
        self.loss.check(seen, self.batch.targets)
        return output, seen

    def evaluation(self, f: Any, u: Any, make_output: Callable[[], Any], engine: str) -> Evaluation:
        """Return the total and its parts from F and u, as the loss receives them."""
        c, targets = self.coefficients, self.batch.targets
        total, parts = self.loss.combined(f, u, targets, self.form, c)
        return Evaluation(total, WeightedParts(c, parts), make_output, engine)


def no_active_dropout(model: nn.Module) -> str:
    """Return the error message for a pass without an active dropout."""
    return (
        f"no active dropout runs in this pass of {type(model).__name__}: check that p > 0 and "
        "that its dropout modules are in train mode."
    )


@dataclass
class Evaluation:
    """A scalar with a graph, and its parts."""

    total: Tensor
    parts: Mapping[str, Tensor]
    """The parts, weighted and without a graph; they add up to the total."""
    make_output: Callable[[], Any]
    engine: str = ""
    """The engine that computed the total, and why it was chosen."""
    last: bool = False
    """Whether this is the last evaluation of the step."""

    @cached_property
    def output(self) -> Any:
        """What the model returned, without noise, in the order of the batch; computed when read."""
        return self.make_output()


class Engine(ABC):
    """A way to compute the output tangent u = ∂F/∂ε, or the regularizers without it."""

    name: ClassVar[str]

    @abstractmethod
    def evaluate(self, request: Request) -> Evaluation:
        """Return the weighted sum of ℓ and both regularizers, ready for one backward pass."""


ENGINES: Registry[str, Callable[[], Engine]] = Registry("engine")
"""Engines by name."""


def as_engine(engine: str | Engine) -> Engine:
    """Return the engine of that name, or the engine itself; an unknown name raises an error."""
    return engine if isinstance(engine, Engine) else ENGINES[engine]()


def refuse_fraction(engine: Engine, request: Request) -> None:
    """Raise an ``EngineError`` for ``fraction`` < 1, for engines other than the antithetic one."""
    if request.fraction < 1.0:
        raise EngineError(
            f"fraction < 1 is for the antithetic engine, got the {engine.name} engine: use "
            "engine='antithetic', or fraction=1."
        )


class WeightedParts(Mapping[str, Tensor]):
    """The parts by name, each times its coefficient; parts with the coefficient 0 are left out.

    They are computed when they are read, because most training steps do not read them. The means are
    ℓ, uᵀHu and ∂ℓ/∂ε, without coefficients.
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
