"""What an objective returns for a batch: a scalar to differentiate, its parts, the model's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from undrop.engines import Evaluation
from undrop.errors import StepError

__all__ = ["Step"]


class Step:
    """One training step's objective, as a sum of evaluations with one graph each.

    The first has been run; the others (further samples of noise) run when they are needed. With
    ``backward()`` each is differentiated before the next is run, so that memory does not grow with
    the number of samples; ``total`` runs them all and holds their graphs.
    """

    def __init__(self, first: Evaluation, rest: Sequence[Callable[[], Evaluation]] = ()) -> None:
        self.output: Any = first.output
        """What the model returned: hidden state and all, without noise unless the objective is
        dropout, where it is that of the first sample."""
        self._held = [first]
        self._waiting = list(rest)
        self._done: list[Evaluation] = []

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
    def parts(self) -> dict[str, float]:
        """Its parts by name: ``loss``, ``explicit``, ``implicit``, …; they add up to the total."""
        self._run_all()
        parts: dict[str, float] = {}
        for evaluation in self._done + self._held:
            for name, value in evaluation.parts.items():
                parts[name] = parts.get(name, 0.0) + float(value)
        return parts

    def backward(self, scale: float = 1.0) -> None:
        """Add the gradient of ``scale · total`` to the parameters' ``.grad``.

        Raises:
            StepError: the second time, when the graphs are gone.
        """
        if not (self._held or self._waiting):
            raise StepError(
                "the gradient of this step has been taken: call the objective again for another one."
            )
        while self._held or self._waiting:
            if not self._held:
                self._held.append(self._waiting.pop(0)())
            evaluation = self._held.pop(0)
            (evaluation.total if scale == 1.0 else evaluation.total * scale).backward()
            evaluation.total = evaluation.total.detach()
            self._done.append(evaluation)

    def _run_all(self) -> None:
        while self._waiting:
            self._held.append(self._waiting.pop(0)())

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value:.6g}" for name, value in self.parts.items())
        return f"Step(total={float(self.total.detach()):.6g}, {parts})"
