"""What an objective returns for a batch: a scalar to differentiate, its parts, the model's output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from undrop.engines import Evaluation
from undrop.errors import StepError
from undrop.torch_compat import other_accelerator, untraced


class AutocastState:
    """The current state of autocast, on the CPU and on the accelerator.

    Further samples of noise run in ``backward()`` or when a part is read. That is usually outside
    the step's ``with torch.autocast(…)``, and may be under ``torch.no_grad()``.
    """

    def __init__(self) -> None:
        cache = torch.is_autocast_cache_enabled()
        self._autocasts = [
            torch.autocast(
                device,
                dtype=torch.get_autocast_dtype(device),
                enabled=torch.is_autocast_enabled(device),
                cache_enabled=cache,
            )
            for device in _devices()
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the block under that state, with gradients enabled."""
        with torch.inference_mode(False), ExitStack() as stack:  # this enables gradients, too
            for autocast in self._autocasts:
                stack.enter_context(autocast)
            yield


@cache
def _devices() -> tuple[str, ...]:
    """Return the device types of this machine that autocast supports."""
    kinds = ["cpu"]
    if torch.cuda.is_available():
        kinds.append("cuda")
    if torch.backends.mps.is_available():
        kinds.append("mps")
    other = other_accelerator()
    if other is not None:
        kinds.append(other.type)
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


class Step:
    """One training step's objective, as a sum of evaluations with one graph each.

    The first evaluation has run; the others (further samples of noise) run when they are needed.
    ``backward()`` differentiates each before the next one runs, so that memory does not grow with the
    number of samples; ``total`` runs them all and holds their graphs.
    """

    def __init__(self, first: Evaluation, later: Iterator[Evaluation] = iter(())) -> None:  # noqa: B008
        self._first = first
        self._held = [first]
        self._later: Iterator[Evaluation] | None = None if first.last else later
        self._done: list[Evaluation] = []

    @property
    def output(self) -> Any:
        """What the model returned, including a hidden state, without noise.

        For a dropout objective, it is the output of the first sample.
        """
        return self._first.output

    @property
    def engine(self) -> str:
        """The engine that computed the regularizers and why it was chosen; empty without them."""
        return self._first.engine

    @property
    def total(self) -> Tensor:
        """The objective; with a graph until ``backward()`` has been called."""
        self._run_all()
        evaluations = self._done + self._held
        total = evaluations[0].total
        for evaluation in evaluations[1:]:
            total = total + evaluation.total
        return total

    @property
    def part_tensors(self) -> dict[str, Tensor]:
        """The parts by name, on their device: reading them does not wait for it."""
        self._run_all()
        parts: dict[str, Tensor] = {}
        for evaluation in self._done + self._held:
            for name, value in evaluation.parts.items():
                parts[name] = parts[name] + value if name in parts else value
        return parts

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name: ``loss``, ``explicit``, ``implicit``, …; they add up to the total."""
        return {name: float(value) for name, value in self.part_tensors.items()}

    @untraced
    def backward(self, scale: float = 1.0) -> None:
        """Add the gradient of ``scale · total`` to the parameters' ``.grad``; call it once."""
        if not self._held and self._later is None:
            raise StepError(
                "this step has already been differentiated: call the objective again for a new step."
            )
        while self._held or self._next():
            evaluation = self._held.pop(0)
            (evaluation.total if scale == 1.0 else evaluation.total * scale).backward()
            evaluation.total = evaluation.total.detach()
            self._done.append(evaluation)

    def _next(self) -> bool:
        """Run one more evaluation, if there is one."""
        if self._later is None:
            return False
        evaluation = next(self._later, None)
        if evaluation is None:
            self._later = None
            return False
        self._held.append(evaluation)
        if evaluation.last:
            self._later = None
        return True

    @untraced
    def _run_all(self) -> None:
        while self._next():
            pass

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value:.6g}" for name, value in self.parts.items())
        return f"Step(total={float(self.total.detach()):.6g}, {parts})"
