"""Optimizers and schedules: SGD, averaged SGD with a non-monotonic trigger, and Adam."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from undrop.errors import NonFiniteError
from undrop.lab.train.config import OptimizerConfig, ScheduleConfig


class RunProgress(NamedTuple):
    """The progress of a run in the units that schedules use."""

    step: int  # optimizer steps taken
    epoch: float  # epochs completed, with the fraction of the current one
    done: float  # the share of the whole run that is complete, from 0 to 1


def lr_factor(schedule: ScheduleConfig, progress: RunProgress) -> float:
    """Return the factor of the learning rate. It depends only on the progress, so it needs no state.

    With ``w`` warm-up steps, the factor is ``min(1, (step + 1) / w)`` times

    - constant: 1;
    - step: ``factor`` to the power of the number of passed milestones, which are epochs;
    - cosine: ``floor + (1 - floor) · ½(1 + cos(π · done))``.
    """
    warmup = min(1.0, (progress.step + 1) / schedule.warmup) if schedule.warmup else 1.0
    if schedule.name == "step":
        passed = sum(progress.epoch >= milestone for milestone in schedule.milestones)
        return float(warmup * schedule.factor**passed)
    if schedule.name == "cosine":
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress.done))
        return warmup * (schedule.floor + (1.0 - schedule.floor) * cosine)
    return warmup


class ParameterAverage:
    """The mean of the parameters over the steps since averaging started (Polyak).

    Averaging starts when the validation loss of an epoch is above the smallest loss that was reached
    more than ``patience`` epochs before: the non-monotonic trigger of NT-ASGD (Merity, Keskar & Socher
    2018). If ``patience`` is None, it never starts.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], patience: int | None) -> None:
        self._parameters = parameters
        self._patience = patience
        self._losses: list[float] = []
        self._steps = 0
        self._means: list[Tensor] = []

    @property
    def active(self) -> bool:
        """Whether averaging has started."""
        return bool(self._means)

    def add(self) -> None:
        """Add the current parameters to the mean: m ← m + (w - m) / n."""
        if self.active:
            self._steps += 1
            with torch.no_grad():
                for mean, parameter in zip(self._means, self._parameters, strict=True):
                    mean.lerp_(parameter, 1.0 / self._steps)

    def observe(self, loss: float) -> None:
        """Record the validation loss of an epoch, and start averaging if the loss triggers it."""
        earlier = [] if self._patience is None else self._losses[: -self._patience]
        if not self.active and earlier and loss > min(earlier):
            self._means = [parameter.detach().clone() for parameter in self._parameters]
        self._losses.append(loss)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Use the mean as the model's parameters within the block."""
        if not self.active or self._steps == 0:
            yield
            return
        originals = [parameter.detach().clone() for parameter in self._parameters]
        self._set(self._means)
        try:
            yield
        finally:
            self._set(originals)

    def _set(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        return {"losses": self._losses, "steps": self._steps, "means": self._means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._losses, self._steps = list(state["losses"]), state["steps"]
        # Not strict: before averaging starts, there are no means.
        pairs = zip(state["means"], self._parameters, strict=False)
        self._means = [mean.to(parameter.device) for mean, parameter in pairs]


class Stepper:
    """Clips the gradients, takes an optimizer step, and with asgd averages the parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> None:
        self._config = config
        self._parameters = parameters
        self._optimizer = _optimizer(parameters, config)
        patience = config.patience if config.name == "asgd" else None
        self.average = ParameterAverage(parameters, patience)

    def step(self, factor: float) -> float:
        """Take a step with ``factor`` times the learning rate; return the gradient's norm, unclipped.

        Raises:
            NonFiniteError: if the norm is infinite or NaN; the parameters stay unchanged.
        """
        max_norm = self._config.clip if self._config.clip is not None else float("inf")
        norm = float(nn.utils.clip_grad_norm_(self._parameters, max_norm, foreach=True))
        if not norm < float("inf"):
            raise NonFiniteError(f"the gradient's norm is {norm}")
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.average.add()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        average = self.average.state_dict() if self._config.name == "asgd" else None
        return {"optimizer": self._optimizer.state_dict(), "average": average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._optimizer.load_state_dict(state["optimizer"])
        if state["average"] is not None:
            self.average.load_state_dict(state["average"])


def clipped_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Return an optimizer of a model's parameters whose ``step`` clips the gradients first."""
    parameters = list(model.parameters())
    optimizer = _optimizer(parameters, config)

    def clip(*_: Any) -> None:
        if config.clip is not None:
            nn.utils.clip_grad_norm_(parameters, config.clip, foreach=True)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def _optimizer(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    decay = config.weight_decay
    if config.name in ("sgd", "asgd"):
        return SGD(parameters, config.lr, momentum=config.momentum, weight_decay=decay)
    adam = Adam if config.name == "adam" else AdamW
    return adam(parameters, config.lr, betas=config.betas, eps=config.eps, weight_decay=decay)
