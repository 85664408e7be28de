"""One step's gradient, over one process or many."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from undrop.lab.models import LanguageModel
from undrop.lab.train.world import World
from undrop.objectives import Objective, Step

__all__ = ["Gradient"]


class _Objective(nn.Module):
    """An objective as a module, so that all passes of a step are one forward of DDP's."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.step: Step | None = None

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        self.step = self.objective(self.model, inputs, targets)
        return self.step.total


class Gradient:
    """Puts the mean gradient of a step over all processes into ``.grad``.

    With several processes the step is one forward and one backward of DDP, so the graphs of all its
    samples are held at once; alone it holds one at a time.
    """

    def __init__(self, model: LanguageModel, objective: Objective, world: World) -> None:
        self._model = model
        self._objective = objective
        self._module: _Objective | None = None
        if world.size > 1:
            self._module = _Objective(model, objective)
            devices = [world.device] if world.device.type == "cuda" else None
            self._parallel = DistributedDataParallel(self._module, device_ids=devices)

    def __call__(self, inputs: Any, targets: Tensor) -> Step:
        """The step, after its backward pass."""
        if self._module is None:
            step: Step = self._objective(self._model, inputs, targets)
            step.backward()
            return step
        self._parallel(inputs, targets).backward()
        done, self._module.step = self._module.step, None
        assert done is not None
        return done
