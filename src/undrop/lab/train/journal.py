"""What a run leaves behind: written by the main process alone, told to whoever listens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from undrop.lab.train.folder import RunFolder
from undrop.lab.train.reporters import Reporter
from undrop.lab.train.world import World
from undrop.tensor_files import owned

__all__ = ["Journal"]


class Journal:
    """The run's folder and its audience."""

    def __init__(self, folder: RunFolder, reporter: Reporter, world: World) -> None:
        self._folder = folder
        self._main = world.is_main
        self.reporter = reporter if world.is_main else Reporter()

    def record(self, record: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        if self._main:
            self._folder.metrics.append(dict(record))
        self.reporter.record(record)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, after the metrics that it knows of are safe on the disk."""
        if self._main:
            length = self._folder.metrics.sync()
            self._folder.checkpoints.save(step, {**state, "metrics": length})

    def save_best(self, weights: Mapping[str, Tensor]) -> None:
        """Keep the weights of the best epoch."""
        if self._main:
            self._folder.write_best({name: owned(value) for name, value in weights.items()})

    def last_checkpoint(self) -> str:
        """The newest checkpoint, in words."""
        steps = self._folder.checkpoints.steps()
        return str(self._folder.checkpoints.path(steps[-1])) if steps else "none yet"

    def stopped(self, step: int) -> str:
        """How to go on after a signal, in words."""
        return (
            f"stopped at step {step} with everything saved: go on with "
            f"undrop train --resume --out {self._folder.path}"
        )
