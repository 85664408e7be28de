"""What is asked of an engine, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from undrop.engines.draw import Draw
from undrop.errors import EngineError, NoDropoutError
from undrop.intercept import call, is_sharded, logits_of
from undrop.losses import Loss

__all__ = ["Engine", "Evaluation", "Request", "Weights"]


class Weights(NamedTuple):
    """The total is ``loss·ℓ + explicit·uᵀHu + implicit·∂ℓ/∂ε``."""

    loss: float
    explicit: float
    implicit: float


@dataclass(frozen=True)
class Request:
    """One evaluation of the regularized loss on one batch, for one draw of η."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss: Loss
    form: str
    """The quadratic form of the explicit part: "hessian", "identity" or "loss-jacobian"."""
    weights: Weights
    draw: Draw
    fraction: float = 1.0
    """ρ: the share of the batch for which the tangent is carried."""
    batch_dim: int = 0

    def run(self) -> tuple[Any, Tensor]:
        """Run the model: all it returns, and of that the tensor which the loss sees, checked."""
        output = call(self.model, self.inputs)
        if not self.draw.asked:
            raise NoDropoutError(
                f"no active dropout was met in this pass of {type(self.model).__name__}: check that "
                "p > 0 and that its dropout modules are in train mode."
            )
        logits = logits_of(output)
        self.loss.check(logits, self.targets)
        self.loss.check_values(logits, self.targets)
        return output, logits


@dataclass
class Evaluation:
    """A scalar to be differentiated, and what it is made of."""

    total: Tensor
    parts: Mapping[str, Tensor]
    """Weighted and without graph; they add up to the total."""
    output: Any
    """What the model returned, without noise."""


class Engine(ABC):
    """A way to have the output tangent u = ∂F/∂ε, or what is made of it."""

    name: str

    @abstractmethod
    def evaluate(self, request: Request) -> Evaluation:
        """The weighted total of ℓ, explicit and implicit part, ready for one backward pass."""


def refuse_sharded(engine: Engine, model: nn.Module) -> None:
    """Raise for FSDP, which has given a parameter's memory back when a second backward asks for it.

    Raises:
        EngineError: naming the engine that can.
    """
    if is_sharded(model):
        raise EngineError(
            f"the {engine.name} engine differentiates twice, which FSDP does not allow: use "
            "engine='antithetic'."
        )


def weighted_parts(
    weights: Weights, loss: Tensor, explicit: Tensor, implicit: Tensor
) -> dict[str, Tensor]:
    """The parts by name, each times its weight; those of weight zero are left out."""
    values = zip(Weights._fields, weights, (loss, explicit, implicit), strict=True)
    return {name: weight * value.detach() for name, weight, value in values if weight != 0.0}
