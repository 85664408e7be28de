"""The result of an objective: a scalar to differentiate, its parts, and the model's output."""

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
    """The state of autocast when this object is made, on the CPU and on the accelerator.

    Evaluations after the first one run in ``step.backward()``, or when a part is read. That is usually
    outside of the ``with torch.autocast(…)`` of the step, and may be under ``torch.no_grad()``.
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
        with torch.inference_mode(False), ExitStack() as stack:  # inference_mode enables gradients
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
    """The objective on one batch, as a sum of evaluations with one graph each.

    The first evaluation has run, and the others run when they are needed. ``backward()`` differentiates
    each one before the next one runs, so memory does not grow with their number. ``total`` runs them all
    and keeps their graphs.
    """

    def __init__(self, first: Evaluation, later: Iterator[Evaluation] = iter(())) -> None:  # noqa: B008
        self._first = first
        self._with_graph = [first]
        self._differentiated: list[Evaluation] = []
        self._later = iter(()) if first.last else later
        self._interrupted = False
        """Whether an error has interrupted an evaluation or its backward pass."""

    @property
    def output(self) -> Any:
        """Everything that the model returns, without noise; with dropout, for the first mask."""
        return self._first.output

    @property
    def engine(self) -> str:
        """The engine that computed the regularizers and why it was chosen; empty without them."""
        return self._first.engine

    @property
    def total(self) -> Tensor:
        """The value of the objective, with a graph until ``backward()`` is called."""
        self._run_all()
        first, *others = self._differentiated + self._with_graph
        return sum((evaluation.total for evaluation in others), first.total)

    @property
    def part_tensors(self) -> dict[str, Tensor]:
        """The parts by name as tensors, so that reading them does not wait for the device."""
        self._run_all()
        parts: dict[str, Tensor] = {}
        for evaluation in self._differentiated + self._with_graph:
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
        if not self._with_graph and not self._next():
            raise StepError(
                "this step has already been differentiated: call the objective again for a new step."
            )
        while self._with_graph or self._next():
            evaluation = self._with_graph.pop(0)
            with self._noting_errors():
                (evaluation.total if scale == 1.0 else evaluation.total * scale).backward()
            evaluation.total = evaluation.total.detach()
            self._differentiated.append(evaluation)

    def _next(self) -> bool:
        """Run the next evaluation; return False if there is none."""
        with self._noting_errors():
            evaluation = next(self._later, None)
        if evaluation is None:
            return False
        self._with_graph.append(evaluation)
        if evaluation.last:
            self._later = iter(())
        return True

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Run a block; after an error in it, every later block is refused."""
        if self._interrupted:
            raise StepError(
                "an error has interrupted this step, so its total is incomplete: call the objective "
                "again for a new step."
            )
        self._interrupted = True
        yield
        self._interrupted = False

    @untraced
    def _run_all(self) -> None:
        while self._next():
            pass

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value:.6g}" for name, value in self.parts.items())
        return f"Step(total={float(self.total.detach()):.6g}, {parts})"
