"""What all objectives share: the checks before a step, and the step itself."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from undrop.engines import Draw, Engine, Evaluation, Request
from undrop.engines.stacking import stack_at_input, stacks_at_input
from undrop.errors import EvalModeError, GradientsDisabledError, NoDropoutError
from undrop.generators import Generators
from undrop.intercept import (
    Batch,
    Interception,
    Selection,
    SiteAction,
    Sites,
    Statistics,
    chosen_backend,
    find_sites,
    follow_masks,
    has_idle_dropout,
    in_training,
    keep_statistics,
    no_noise,
    outside_interception,
    tensors_in,
    uncompiled,
)
from undrop.losses import Coefficients, Loss, as_loss
from undrop.objectives.checks import StepCheck, warn_of_unused_outputs
from undrop.objectives.step import AutocastState, Step
from undrop.registry import Registry
from undrop.torch_compat import Backend, force_eager, portable_lstm, untraced

_log = logging.getLogger("undrop")

LossLike: TypeAlias = Loss | Callable[[Tensor, Any], Tensor] | None
"""A loss as users pass it; None takes the model's own loss, or cross-entropy on its output."""


class Objective(ABC):
    """What training minimizes. ``objective(model, inputs, targets)`` returns a :class:`Step`.

    A new objective is one subclass with ``evaluations``. An objective counts its steps and keeps its
    random generators; both are in ``state_dict()``.

    Args:
        loss: a ``Loss``, one of torch's loss modules, or any callable that returns a mean; None uses
            the model's own loss (Transformers), or cross-entropy on its output.
        generator: the source of the noise; None makes a generator that ``torch.manual_seed`` seeds.
    """

    needs_dropout = True
    """Whether a model without dropout is an error."""
    engine: Engine
    """The engine, for an objective with regularizers."""
    mask = "as-declared"
    """The mask structure of η, "as-declared" or "independent"; see ``Analytic``."""
    interval = 1
    """The objective regularizes every ``interval`` steps."""

    def __init__(self, *, loss: LossLike = None, generator: torch.Generator | None = None) -> None:
        self.loss = as_loss(loss)
        self.generators = Generators(generator)
        self.selection = Selection()
        self.steps = 0
        self._stack_at_input = False
        """Whether batches are stacked at the input, because a loaded state says so."""
        self._forget_models()

    def _forget_models(self) -> None:
        """Start without any knowledge about models."""
        self._sites = weakref.WeakKeyDictionary[nn.Module, Sites]()
        self._masks_followed = weakref.WeakSet[nn.Module]()
        self._backends = weakref.WeakKeyDictionary[nn.Module, Backend | None]()
        self._step_check = StepCheck()

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except the knowledge about models, which is not saved."""
        about_models = ("_sites", "_masks_followed", "_backends", "_step_check")
        return {k: v for k, v in self.__dict__.items() if k not in about_models}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the options and the generators."""
        self.__dict__.update(state)
        self._forget_models()

    @property
    def implicit_factor(self) -> float | None:
        """The factor of ∂ℓ/∂ε: 0 if the noise is off, None for an objective without regularizers."""
        return None

    @abstractmethod
    def evaluations(self, batch: Batch) -> Iterator[Evaluation]:
        """Yield one or more evaluations, whose sum is the objective.

        The first is computed by the call of the objective, the others by ``step.backward()`` or when
        ``step.total`` or ``step.parts`` is read.
        """

    @untraced
    def __call__(self, model: nn.Module, inputs: Any, targets: Any = None) -> Step:
        """Evaluate the objective on a batch.

        Args:
            model: any module, in train mode. The call does not change it, except that running statistics
                are updated once.
            inputs: a tensor, a tuple (positional arguments) or a dict (keyword arguments).
            targets: what the loss compares the output with; None takes ``labels`` from a dict of inputs.
                A Transformers model's targets are its labels, which its head may shift: pass
                ``loss=undrop.CrossEntropy()`` to compare position by position.

        Raises:
            UndropError: one of its subclasses, for bad input; the model is then unchanged.
        """
        # A pass of another model may contain this call, and compiled code would hide the dropout.
        with outside_interception(), force_eager():
            plain_model = uncompiled(model)  # raises an error if it is not a module
            backend = self._backend(model)
            batch = self.loss.prepare(plain_model, inputs, targets)._replace(backend=backend)
            self._check_batch(batch)
            evaluations = self.evaluations(batch)
            statistics = Statistics(batch.model)
            try:
                first = next(evaluations)
                self._check_evaluation(first, batch)
                warn_of_unused_outputs(batch.model, first)
            except BaseException:
                statistics.restore()
                raise
        self.steps += 1
        if first.last:
            return Step(first)
        return Step(first, self._later(evaluations, batch, AutocastState()))

    def _later(
        self, evaluations: Iterator[Evaluation], batch: Batch, autocast: AutocastState
    ) -> Iterator[Evaluation]:
        """Yield the other evaluations, computed under the autocast of the first one.

        They do not update running statistics.
        """
        while True:
            with (
                autocast.restored(),
                outside_interception(),
                force_eager(),
                keep_statistics(batch.model),
            ):
                evaluation = next(evaluations, None)
                if evaluation is None:
                    return
                self._check_evaluation(evaluation, batch)
            yield evaluation

    def _check_evaluation(self, evaluation: Evaluation, batch: Batch) -> None:
        if not evaluation.total.requires_grad:
            raise _no_trainable_parameter(batch.model)
        self._step_check(self.steps, evaluation, batch, self)

    def forward_and_loss(self, batch: Batch, action: SiteAction | None) -> tuple[Any, Tensor]:
        """Run one pass and return the output and the loss; ``action`` None keeps torch's own dropout."""
        with portable_lstm() if action is None else Interception(batch.model, action):
            output = batch.forward()
        f = batch.loss.select(output)
        batch.loss.check(f, batch.targets)
        return output, batch.loss.value(f, batch.targets)

    def _sign_draw(self) -> Draw:
        """Return a new draw of η = ±1."""
        return Draw("sign", self.mask, self.selection, self.generators)

    def request(self, batch: Batch, coefficients: Coefficients, **options: Any) -> Request:
        """Return the request for the engine, with a new draw of η."""
        return Request(batch=batch, draw=self._sign_draw(), coefficients=coefficients, **options)

    def run_engine(self, request: Request) -> Evaluation:
        """Return the engine's evaluation, or that of the plain loss if every dropout now has p = 0."""
        try:
            return self.engine.evaluate(request)
        except NoDropoutError:
            batch = request.batch
            self._sites.pop(batch.model, None)
            if self.sites(batch.model, batch.inputs):
                raise
            plain = self.plain_loss(batch)
            total = request.coefficients.loss * plain.total
            return Evaluation(total, {"loss": total.detach()}, plain.make_output)

    def plain_loss(self, batch: Batch) -> Evaluation:
        """Return an evaluation of the loss alone, with every dropout switched off."""
        output, loss = self.forward_and_loss(batch, no_noise)
        return Evaluation(loss, {"loss": loss.detach()}, lambda: output)

    def trainable_parameters(self, model: nn.Module) -> list[Tensor]:
        """Return the trainable parameters of the model and of the loss, each once."""
        parameters = dict.fromkeys(chain(model.parameters(), self.loss.parameters()))
        return [p for p in parameters if p.requires_grad and p.is_leaf]

    def sites(self, model: nn.Module, inputs: Any) -> Sites:
        """Return the model's sites, which are looked up at its first step.

        If every dropout has p = 0, there are no sites, and they are looked up again at every step.
        """
        if model not in self._sites:
            trainable = chain(self.trainable_parameters(model), tensors_in(inputs))
            if not any(t.requires_grad for t in trainable):
                raise _no_trainable_parameter(model)
            try:
                sites = find_sites(model, inputs)
            except NoDropoutError:
                if has_idle_dropout(model, inputs):
                    return Sites(())
                raise
            self.selection.check(sites.names)
            self._sites[model] = sites
            if self._stack_at_input:
                stack_at_input(model)
            _warn_of_unaccounted(model, sites)
        return self._sites[model]

    def _backend(self, model: nn.Module) -> Backend | None:
        """Return the backend if the user compiled the model, else None.

        The look-up visits every module, so it is repeated only at steps 1, 2, 4, 8, …. A model that is
        compiled between two look-ups runs uncompiled until the next one, with the same results.
        """
        if model not in self._backends or self.steps & (self.steps - 1) == 0:
            self._backends[model] = chosen_backend(model)
        return self._backends[model]

    def _check_batch(self, batch: Batch) -> None:
        if not torch.is_grad_enabled():
            raise GradientsDisabledError(
                "an objective needs gradients: call it outside of torch.no_grad() and "
                "torch.inference_mode()."
            )
        if not in_training(batch.model):
            raise EvalModeError(
                f"{type(batch.model).__name__} is in eval mode, where its dropout is off: call "
                "model.train() first."
            )
        if self.needs_dropout:
            self.sites(batch.model, batch.inputs)
        elif batch.model not in self._masks_followed:
            follow_masks(batch.model, batch.inputs)
            self._masks_followed.add(batch.model)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the state of every generator, and where batches are stacked."""
        return {
            "steps": self.steps,
            "generators": self.generators.state_dict(),
            "stack_at_input": any(map(stacks_at_input, self._sites)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state."""
        self.steps = int(state["steps"])
        self.generators.load_state_dict(state["generators"])
        self._stack_at_input = bool(state.get("stack_at_input", False))
        self._sites.clear()


OBJECTIVES: Registry[str, Callable[..., Objective]] = Registry("objective")
"""The objectives that ``undrop train`` knows; some are the same class with other defaults."""


_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _warn_of_unaccounted(model: nn.Module, sites: Sites) -> None:
    """Log once per model the random numbers that belong to no site."""
    if not sites.unaccounted or model in _warned:
        return
    _warned.add(model)
    more = len(sites.unaccounted) - 3
    _log.warning(
        "%s draws random numbers that belong to no dropout site, and they stay random: %s%s. "
        "undrop.sites lists them.",
        type(model).__name__,
        "; ".join(map(str, sites.unaccounted[:3])),
        f"; and {more} more" if more > 0 else "",
    )


def _no_trainable_parameter(model: nn.Module) -> GradientsDisabledError:
    return GradientsDisabledError(
        f"no parameter of {type(model).__name__} requires a gradient: set requires_grad_(True) on the "
        "parameters to train."
    )
