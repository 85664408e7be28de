"""An objective's state as one file, beside the checkpoint of whoever trains."""

from __future__ import annotations

from pathlib import Path

from undrop.objectives import Objective
from undrop.train.checkpoints import load_tensors, save_tensors
from undrop.train.files import replacing
from undrop.train.tree import from_bytes, to_bytes

__all__ = ["load_state", "save_state"]


def save_state(objective: Objective, path: Path) -> None:
    """Write the state of an objective, whole or not at all."""
    with replacing(path) as temporary:
        save_tensors(temporary, {"objective": to_bytes(objective.state_dict())})


def load_state(objective: Objective, path: Path) -> None:
    """Let an objective go on from a saved state.

    Raises:
        CheckpointError: if the file is not there, cut short or changed.
    """
    objective.load_state_dict(from_bytes(load_tensors(path)["objective"]))
