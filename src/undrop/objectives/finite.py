"""Finding parts of an objective that are not finite, without waiting for the device."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrop.engines import Evaluation
from undrop.errors import NonFiniteError
from undrop.intercept import Batch, Interception, Site, keep_statistics

__all__ = ["FiniteCheck"]


class _Pending(NamedTuple):
    step: int
    names: list[str]
    values: Tensor  # on the host, once ``arrived`` has happened
    arrived: Any


class FiniteCheck:
    """Looks at the parts of every evaluation.

    On the CPU it reads them at once. On another device it copies them to the host in the background
    and looks at a copy when it has arrived, at a later step: a step never waits for the device.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()

    def add(self, step: int, evaluation: Evaluation, batch: Batch) -> None:
        """Take the parts of an evaluation.

        Raises:
            NonFiniteError: naming the parts, the step and the first site with non-finite values.
        """
        names = ["total", *evaluation.parts]
        values = torch.stack(
            [x.detach().float() for x in (evaluation.total, *evaluation.parts.values())]
        )
        if values.device.type == "cpu":
            self._look(_Pending(step, names, values, None), batch)
            return
        host = values.to("cpu", non_blocking=True)
        event = torch.get_device_module(values.device).Event()
        event.record()
        self._pending.append(_Pending(step, names, host, event))
        while self._pending and self._pending[0].arrived.query():
            self._look(self._pending.popleft(), batch)

    def _look(self, pending: _Pending, batch: Batch) -> None:
        values = pending.values.numpy().tolist()  # host memory: no operation of torch
        if not math.isfinite(values[0]):
            bad = [
                name
                for name, value in zip(pending.names, values, strict=True)
                if not math.isfinite(value) and name != "total"
            ]
            self._pending.clear()
            raise NonFiniteError(_message(bad, pending.step, batch))


def _message(bad: list[str], step: int, batch: Batch) -> str:
    """Name the part that is not finite, and the first site with a non-finite activation."""
    reached: list[str] = []

    def watch(site: Site, h: Tensor) -> Tensor:
        if not reached and not bool(torch.isfinite(h).all()):
            reached.append(site.name)
        return h

    with torch.no_grad(), keep_statistics(batch.model), Interception(batch.model, watch):
        batch.forward()
    *others, last = bad or ["total"]
    parts = f"{', '.join(others)} and {last} parts are" if others else f"{last} part is"
    what = f"the {parts} not finite at step {step}"
    if reached:
        return f"{what}: the activation at site {reached[0]!r} is not either."
    return (
        f"{what}, while the activations at every site are: look at the layers after the last site, "
        "the learning rate, or the inputs."
    )
