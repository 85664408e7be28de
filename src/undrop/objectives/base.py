"""What all objectives share: checks before a step, and a step that leaves the model as it was."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from undrop.engines import Evaluation
from undrop.errors import EvalModeError, GradientsDisabledError, NonFiniteError
from undrop.generators import Generators
from undrop.intercept import (
    Field,
    Interception,
    Selection,
    Site,
    Sites,
    Statistics,
    apart,
    call,
    in_training,
    keep_statistics,
    logits_of,
    silent,
    sites,
    tensors_in,
    unwrapped,
)
from undrop.losses import Loss, as_loss
from undrop.objectives.autocast import AutocastState
from undrop.objectives.step import Step
from undrop.torch_compat import portable_lstm

__all__ = ["Objective", "Plan"]

Plan: TypeAlias = Sequence[Callable[[], Evaluation]]
"""The evaluations that a step consists of, not yet run."""


class Objective(ABC):
    """What training minimises. ``objective(model, inputs, targets)`` returns a :class:`Step`.

    An objective is added by one subclass with ``plan``. It keeps a count of its steps and its random
    generators, and both are in ``state_dict()``.

    Args:
        loss: a ``Loss``, one of torch's loss modules, or any callable that returns a mean; None is
            cross-entropy on the model's output.
        generator: where its noise comes from; None makes one that ``torch.manual_seed`` seeds.
    """

    needs_dropout = True
    """Whether a model without dropout is an error."""
    interval = 1
    """Steps between two that regularize."""

    def __init__(
        self,
        *,
        loss: Loss | Callable[[Tensor, Any], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.loss = as_loss(loss)
        self.randomness = Generators(generator)
        self.selection = Selection()
        self.steps = 0
        self._sites: weakref.WeakKeyDictionary[nn.Module, Sites] = weakref.WeakKeyDictionary()

    @property
    def implicit_factor(self) -> float | None:
        """The factor of ∂ℓ/∂ε; 0 without that noise, None for an objective without analytic terms."""
        return None

    @abstractmethod
    def plan(self, model: nn.Module, inputs: Any, targets: Any) -> Plan:
        """The evaluations of this step; at least one."""

    def __call__(self, model: nn.Module, inputs: Any, targets: Any) -> Step:
        """Evaluate the objective on a batch.

        Args:
            model: any module, in train mode. It is left as it was but for running statistics, which
                move once.
            inputs: a tensor, a tuple (positional) or a dict (keyword arguments).
            targets: what the loss compares the output with.

        Raises:
            UndropError: one of its subclasses, for bad input; then nothing in the model has changed.
        """
        with apart():  # the pass of another model may be what calls this
            return self._step(unwrapped(model), inputs, targets)

    def _step(self, model: nn.Module, inputs: Any, targets: Any) -> Step:
        self._check(model, inputs)
        plan = [self._checked(run, model, inputs) for run in self.plan(model, inputs, targets)]
        statistics = Statistics(model)
        try:
            first = plan[0]()
        except BaseException:
            statistics.restore()
            raise
        self.steps += 1
        return Step(first, self._later(plan[1:], model, inputs))

    def _later(self, plan: Plan, model: nn.Module, inputs: Any) -> Plan:
        """Evaluations that are run as the first one was, whenever that is, and move no statistics."""
        if not plan:
            return []
        around = AutocastState(chain(model.parameters(), model.buffers(), tensors_in(inputs)))

        def kept(run: Callable[[], Evaluation]) -> Evaluation:
            with around.again(), apart(), keep_statistics(model):
                return run()

        return [partial(kept, run) for run in plan]

    def passed(
        self, model: nn.Module, inputs: Any, targets: Any, field: Field | None
    ) -> tuple[Any, Tensor]:
        """One pass: all that the model returns, and the loss. A field of None is torch's dropout."""
        with portable_lstm() if field is None else Interception(model, field):
            output = call(model, inputs)
        logits = logits_of(output)
        self.loss.check(logits, targets)
        self.loss.check_values(logits, targets)
        return output, self.loss.value(logits, targets)

    def plain(self, model: nn.Module, inputs: Any, targets: Any) -> Evaluation:
        """The loss alone, with every dropout switched off."""
        output, loss = self.passed(model, inputs, targets, silent)
        return Evaluation(loss, {"loss": loss.detach()}, output)

    def trained(self, model: nn.Module) -> list[Tensor]:
        """The parameters that are trained, of the model and within the loss, each once."""
        every = dict.fromkeys(chain(model.parameters(), self.loss.parameters()))
        return [p for p in every if p.requires_grad and p.is_leaf]

    def sites(self, model: nn.Module, inputs: Any) -> Sites:
        """The model's noise sites, found the first time the model is seen."""
        if model not in self._sites:
            if not self.trained(model) and not any(t.requires_grad for t in tensors_in(inputs)):
                raise _nothing_trained(model)
            found = sites(model, inputs)
            self.selection.check(found.names)
            self._sites[model] = found
        return self._sites[model]

    def _check(self, model: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            raise GradientsDisabledError(
                "an objective needs gradients: call it outside of torch.no_grad() and "
                "torch.inference_mode()."
            )
        if not in_training(model):
            raise EvalModeError(
                f"{type(model).__name__} is in eval mode, where its dropout is off: call "
                "model.train() first."
            )
        if self.needs_dropout:
            self.sites(model, inputs)

    def _checked(
        self, run: Callable[[], Evaluation], model: nn.Module, inputs: Any
    ) -> Callable[[], Evaluation]:
        def checked() -> Evaluation:
            evaluation = run()
            if not math.isfinite(evaluation.total.item()):
                raise NonFiniteError(_not_finite(evaluation, model, inputs))
            if not evaluation.total.requires_grad:
                raise _nothing_trained(model)
            return evaluation

        return checked

    def state_dict(self) -> dict[str, Any]:
        """The count of steps and the state of every generator."""
        return {"steps": self.steps, "generators": self.randomness.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.steps = int(state["steps"])
        self.randomness.load_state_dict(state["generators"])


def _nothing_trained(model: nn.Module) -> GradientsDisabledError:
    return GradientsDisabledError(
        f"no parameter of {type(model).__name__} requires a gradient: set requires_grad_(True) on those "
        "that are to be trained."
    )


def _not_finite(evaluation: Evaluation, model: nn.Module, inputs: Any) -> str:
    """Which part is not finite, and the first site that a non-finite activation reaches."""
    bad = [name for name, value in evaluation.parts.items() if not torch.isfinite(value)]
    reached: list[str] = []

    def watch(site: Site, h: Tensor) -> Tensor:
        if not reached and not bool(torch.isfinite(h).all()):
            reached.append(site.name)
        return h

    with torch.no_grad(), keep_statistics(model), Interception(model, watch):
        call(model, inputs)
    *others, last = bad or ["total"]
    parts = f"{', '.join(others)} and {last} parts are" if others else f"{last} part is"
    if reached:
        return f"the {parts} not finite: the activation at site {reached[0]!r} is not either."
    return (
        f"the {parts} not finite, while the activations at every site are: look at the layers after "
        "the last site, the learning rate, or the inputs."
    )
