"""The state of an objective or a tuner as one file, beside a trainer's checkpoint."""

from __future__ import annotations

from pathlib import Path

from undrop.files import replacing
from undrop.objectives import Objective
from undrop.tensor_files import from_bytes, load_tensors, save_tensors, to_bytes
from undrop.tuning import Tuner


def save_state(objective: Objective | Tuner, path: Path) -> None:
    """Write the state of an objective, whole or not at all."""
    with replacing(path) as temporary:
        save_tensors(temporary, {"objective": to_bytes(objective.state_dict())})


def load_state(objective: Objective | Tuner, path: Path) -> None:
    """Restore an objective's saved state.

    Raises:
        CheckpointError: if the file is not there, cut short or changed.
    """
    objective.load_state_dict(from_bytes(load_tensors(path)["objective"]))
