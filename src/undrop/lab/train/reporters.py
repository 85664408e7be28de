"""Who hears of a run while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from undrop.errors import RunError
from undrop.losses import Loss

__all__ = ["Outline", "Reporter", "Reporters", "TensorBoard", "Watching"]


class Watching(Protocol):
    """Looks at the model now and then while it trains; :class:`undrop.Watcher` does."""

    def observe(
        self, step: int, model: nn.Module, inputs: Any, targets: Any, *, loss: Loss
    ) -> Mapping[str, float] | None:
        """Figures of this step for the metrics, or None."""
        ...


@dataclass(frozen=True)
class Outline:
    """What a run is about to do."""

    name: str
    model: str
    objective: str
    corpus: str
    parameters: int
    vocabulary: int
    train_tokens: int
    device: str
    epochs: int
    done: float  # the part that an earlier process has done


class Reporter:
    """Hears nothing and says nothing; a subclass takes what it wants to hear."""

    def begin(self, outline: Outline) -> None:
        """The run starts, or goes on."""

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """A step was made; ``done`` is the part of the whole run, ``parts`` the objective's."""

    def record(self, record: Mapping[str, Any]) -> None:
        """A line was added to the metrics."""

    def say(self, text: str) -> None:
        """Something that a person should know."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run has ended."""

    def close(self) -> None:
        """The run is over, whichever way."""


class Reporters(Reporter):
    """Several reporters as one."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = reporters

    def begin(self, outline: Outline) -> None:
        """Tell all."""
        for reporter in self._reporters:
            reporter.begin(outline)

    def step(self, done: float, tokens: int, parts: Mapping[str, float]) -> None:
        """Tell all."""
        for reporter in self._reporters:
            reporter.step(done, tokens, parts)

    def record(self, record: Mapping[str, Any]) -> None:
        """Tell all."""
        for reporter in self._reporters:
            reporter.record(record)

    def say(self, text: str) -> None:
        """Tell all."""
        for reporter in self._reporters:
            reporter.say(text)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Tell all."""
        for reporter in self._reporters:
            reporter.end(summary)

    def close(self) -> None:
        """Tell all."""
        for reporter in self._reporters:
            reporter.close()


class TensorBoard(Reporter):
    """Writes every number of the metrics as a scalar for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RunError(
                "train.tensorboard needs the tensorboard package: pip install 'undrop[tensorboard]'."
            ) from error
        self._writer = SummaryWriter(str(folder))

    def record(self, record: Mapping[str, Any]) -> None:
        """Add one scalar for each number."""
        values = {**record, **record["time"]}
        for name, value in values.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
