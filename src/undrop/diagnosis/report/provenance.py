"""Where the numbers of a diagnosis come from."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from undrop import __version__
from undrop.diagnosis.measure.model import MeasuredModel, Pair


@dataclass(frozen=True)
class Provenance:
    """When, with which versions, on which model and data, and for how long."""

    date: str
    """The date and time in UTC."""
    undrop: str
    torch: str
    python: str
    device: str
    dtype: str
    model: str
    parameters: int
    data: str
    """The number of batches and the shapes of the first one."""
    validation: str | None
    seconds: float
    masks: int

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table."""
        return [
            ("date", self.date),
            ("versions", f"undrop {self.undrop}, torch {self.torch}, Python {self.python}"),
            ("model", f"{self.model}, {self.parameters:,} parameters"),
            ("device", f"{self.device}, {self.dtype}"),
            ("data", self.data),
            *([("validation", self.validation)] if self.validation is not None else []),
            ("effort", f"{self.seconds:.1f} s, {self.masks:,} masks"),
        ]


def provenance_of(
    subject: MeasuredModel, validation: Sequence[Pair], *, seconds: float, masks: int
) -> Provenance:
    """Collect the provenance of a diagnosis."""
    parameters, batches = list(subject.model.parameters()), subject.batches
    first = parameters[0] if parameters else torch.zeros(())
    return Provenance(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        undrop=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        device=str(first.device),
        dtype=str(first.dtype).removeprefix("torch."),
        model=subject.name,
        parameters=sum(p.numel() for p in parameters),
        data=_describe_data(len(batches), batches[0].inputs, batches[0].targets),
        validation=_describe_data(len(validation), *validation[0]) if validation else None,
        seconds=seconds,
        masks=masks,
    )


def _describe_data(count: int, inputs: Any, targets: Any) -> str:
    batches = "1 batch" if count == 1 else f"{count} batches"
    return f"{batches}; the first has inputs {_shapes(inputs)} and targets {_shapes(targets)}"


def _shapes(value: Any) -> str:
    shapes = ["×".join(map(str, x.shape)) for x in tree_leaves(value) if isinstance(x, Tensor)]
    return ", ".join(shapes[:4]) or "without tensors"
