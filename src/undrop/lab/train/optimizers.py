"""From gradients to steps: SGD, averaged SGD with a non-monotonic trigger, Adam."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undrop.errors import NonFiniteError
from undrop.lab.train.config import OptimizerConfig

__all__ = ["Average", "Stepper"]


class Average:
    """The mean of the parameters over the steps since averaging began (Polyak).

    It begins when validation has not improved on the best of more than ``patience`` epochs ago: the
    non-monotonic trigger of NT-ASGD (Merity, Keskar & Socher 2018).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], patience: int) -> None:
        self._parameters = parameters
        self._patience = patience
        self._losses: list[float] = []
        self._steps = 0
        self._means: list[Tensor] = []

    @property
    def active(self) -> bool:
        """Whether averaging has begun."""
        return bool(self._means)

    def add(self) -> None:
        """Take the parameters as they are now into the mean: m ← m + (w - m) / n."""
        if self.active:
            self._steps += 1
            with torch.no_grad():
                for mean, parameter in zip(self._means, self._parameters, strict=True):
                    mean.lerp_(parameter, 1.0 / self._steps)

    def observe(self, loss: float) -> None:
        """Tell the validation loss of an epoch, which may begin the averaging."""
        earlier = self._losses[: -self._patience]
        if not self.active and earlier and loss > min(earlier):
            self._means = [parameter.detach().clone() for parameter in self._parameters]
        self._losses.append(loss)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the mean as its parameters for a while."""
        if not self.active or self._steps == 0:
            yield
            return
        kept = [parameter.detach().clone() for parameter in self._parameters]
        self._set(self._means)
        try:
            yield
        finally:
            self._set(kept)

    def _set(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on."""
        return {"losses": self._losses, "steps": self._steps, "means": self._means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._losses, self._steps = list(state["losses"]), state["steps"]
        pairs = zip(state["means"], self._parameters, strict=False)
        self._means = [mean.to(parameter.device) for mean, parameter in pairs]


class Stepper:
    """Clips the gradients, steps, and averages if that is asked for."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> None:
        self._config = config
        self._parameters = parameters
        self._optimizer = _optimizer(parameters, config)
        self.average = Average(parameters, config.patience) if config.name == "asgd" else None

    def step(self, factor: float) -> float:
        """One step at ``factor`` times the learning rate; the gradient's norm before clipping.

        Raises:
            NonFiniteError: if that is not finite; nothing is changed then.
        """
        limit = self._config.clip if self._config.clip is not None else float("inf")
        norm = float(nn.utils.clip_grad_norm_(self._parameters, limit, foreach=True))
        if not norm < float("inf"):
            raise NonFiniteError(f"the gradient's norm is {norm}")
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.add()
        return norm

    @contextlib.contextmanager
    def judged(self) -> Iterator[None]:
        """Let the model have the parameters to judge it by: the mean, where there is one."""
        with self.average.applied() if self.average is not None else contextlib.nullcontext():
            yield

    @property
    def averages(self) -> bool:
        """Whether averaging has begun."""
        return self.average is not None and self.average.active

    def observe(self, loss: float) -> None:
        """Tell the validation loss of an epoch."""
        if self.average is not None:
            self.average.observe(loss)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on."""
        average = self.average.state_dict() if self.average is not None else None
        return {"optimizer": self._optimizer.state_dict(), "average": average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])


def _optimizer(
    parameters: Sequence[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    decay = config.weight_decay
    if config.name == "adam":
        return torch.optim.Adam(
            parameters, config.lr, betas=config.betas, eps=config.eps, weight_decay=decay
        )
    if config.name == "adamw":
        return torch.optim.AdamW(
            parameters, config.lr, betas=config.betas, eps=config.eps, weight_decay=decay
        )
    return torch.optim.SGD(parameters, config.lr, momentum=config.momentum, weight_decay=decay)
