"""undrop in Lightning: two lines in ``training_step``, and a callback for logs and checkpoints.

>>> import lightning as L
>>> import undrop
>>> from undrop.integrations.lightning import UndropCallback
>>> class Classifier(L.LightningModule):
...     def __init__(self, net):
...         super().__init__()
...         self.net, self.objective = net, undrop.Analytic()
...
...     def training_step(self, batch, index):
...         step = self.objective(self.net, *batch)
...         return {"loss": step.total, "parts": step.parts}
...
...     def configure_callbacks(self):
...         return [UndropCallback(self.objective)]

Lightning handles accumulation, mixed precision, clipping and several devices. A callback alone is not
enough: it can't replace the loss that ``training_step`` returns.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from undrop.errors import MissingExtraError, OptionError
from undrop.objectives import Objective
from undrop.tuning import Tuner

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise MissingExtraError("undrop.integrations.lightning", "Lightning", "lightning") from error

_log = logging.getLogger("undrop")


class UndropCallback(Callback):
    """Logs ``undrop/loss``, ``undrop/explicit``, ``undrop/implicit``, and saves the objective's state.

    At the first step it reports the objective in one line. It raises an error if ``training_step`` does
    not use the objective. The state is part of Lightning's checkpoints, so a resumed fit draws the same
    noise as an uninterrupted one. With several processes, Lightning saves the state of the first
    process, and the other processes derive their noise from it.

    With a :class:`~undrop.Tuner` instead of the objective, call ``tuner.step`` in ``training_step``. The
    callback then also logs ``undrop/p/SITE`` and ``undrop/benefit/SITE``.

    Args:
        objective: the objective, or the tuner, that ``training_step`` calls.
    """

    def __init__(self, objective: Objective | Tuner) -> None:
        super().__init__()
        self.objective = objective
        self._reported = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the parts of the step.

        Raises:
            OptionError: if ``training_step`` does not return the parts, or never calls the objective.
        """
        parts = outputs.get("parts") if isinstance(outputs, Mapping) else None
        if parts is None or not self.objective.steps:
            raise OptionError(
                f"{type(pl_module).__name__}.training_step does not train on the objective: call "
                "step = objective(model, inputs, targets) in it and return "
                "{'loss': step.total, 'parts': step.parts}."
            )
        tuned = self.objective.metrics() if isinstance(self.objective, Tuner) else {}
        pl_module.log_dict({f"undrop/{name}": v for name, v in {**parts, **tuned}.items()})
        if not self._reported and trainer.is_global_zero:
            values = ", ".join(f"{name} = {value:.4g}" for name, value in parts.items())
            names = type(self.objective).__name__, type(pl_module).__name__
            _log.warning("undrop is active: %s on %s, %s", *names, values)
        self._reported = True

    def state_dict(self) -> dict[str, Any]:
        """Return the objective's state, which Lightning saves in the checkpoint."""
        return self.objective.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the objective's state from a checkpoint."""
        self.objective.load_state_dict(state_dict)
