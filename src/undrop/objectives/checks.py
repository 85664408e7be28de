"""Check every step: the total is finite, dropout has an effect, and the loss uses every output.

A non-finite total is an error; failures of the other two are logged. No check waits for the device.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from undrop.engines import Evaluation
from undrop.errors import NonFiniteError
from undrop.intercept import Batch, Interception, Site, is_sharded, keep_statistics, tensors_in

if TYPE_CHECKING:
    from undrop.objectives.base import Objective

_log = logging.getLogger("undrop")

_EXPLICIT, _IMPLICIT = 1e-10, 1e-5
"""Rounding alone can make uᵀHu and ∂ℓ/∂ε this large, relative to the loss."""


def fingerprint(parameters: Sequence[Tensor]) -> Tensor:
    """Return a number that changes with the weights; sparse weights, which have no norm, are ignored."""
    dense = [p.detach() for p in parameters if p.layout is torch.strided]
    if not dense:  # the user optimizes only the inputs
        return torch.zeros(())
    norms = torch._foreach_norm(dense, 1)
    dtype = torch.float32 if norms[0].device.type == "mps" else torch.float64  # MPS has no float64
    return torch.stack([norm.to(dtype) for norm in norms]).sum()


def has_no_effect(parts: Mapping[str, float]) -> bool:
    """Return whether the regularizers of a step are 0, up to rounding."""
    if not {"explicit", "implicit"} & parts.keys():
        return False
    loss, explicit, implicit = (abs(parts.get(n, 0.0)) for n in ("loss", "explicit", "implicit"))
    return explicit <= _EXPLICIT * loss and implicit <= _IMPLICIT * loss


class _Pending(NamedTuple):
    """Numbers of an evaluation that are being copied from the device."""

    step: int
    names: list[str]
    values: Tensor
    """The numbers, on the host; valid when the event ``arrived`` has completed."""
    arrived: Any
    parts: Mapping[str, Tensor]
    """The parts of the evaluation, on the device."""


class StepCheck:
    """Checks that the total of every evaluation is finite, and that dropout has an effect (u ≠ 0).

    On the CPU it reads the numbers immediately. From another device it copies them to the host in the
    background, and checks the copy at a later step, so that no step waits for the device.

    One step with u = 0 is normal: LoRA starts with B = 0. A warning is logged, once, if u is still 0
    after the weights have changed. Counting steps would not do, because micro-batches and steps with a
    learning rate of 0 do not change the weights.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        self._effect_known = False
        """Whether dropout had an effect in some step, or the warning was logged: the check has ended."""
        self._weights: float | None = None
        """The fingerprint of the weights at the first step without an effect."""

    def __call__(
        self, step: int, evaluation: Evaluation, batch: Batch, objective: Objective
    ) -> None:
        """Check an evaluation, now or when its numbers have arrived from the device.

        Raises:
            NonFiniteError: it names the parts, the step and the first site with non-finite values.
        """
        parts, tensors = evaluation.parts, {"total": evaluation.total}
        if self._checks_effect(evaluation, batch):
            weights = fingerprint(objective.trainable_parameters(batch.model))
            tensors |= {**parts, "weights": weights}
        elif _known_finite(evaluation.total):
            return
        values = torch.stack([x.detach().float() for x in tensors.values()])
        pending = _Pending(step, list(tensors), values, None, parts)
        if values.device.type == "cpu":
            self._check(pending, batch, objective)
            return
        host = values.to("cpu", non_blocking=True)
        event = torch.get_device_module(values.device).Event()
        event.record()
        self._pending.append(pending._replace(values=host, arrived=event))
        while self._pending and self._pending[0].arrived.query():
            self._check(self._pending.popleft(), batch, objective)

    def _checks_effect(self, evaluation: Evaluation, batch: Batch) -> bool:
        """Return whether to check in this evaluation that dropout has an effect."""
        parts = evaluation.parts
        return (
            not self._effect_known
            and "loss" in parts
            and ("explicit" in parts or "implicit" in parts)
            and not is_sharded(batch.model)
        )

    def _check(self, pending: _Pending, batch: Batch, objective: Objective) -> None:
        numbers = pending.values.numpy().tolist()  # numpy, because torch could wait for the device
        values = dict(zip(pending.names, numbers, strict=True))
        if not math.isfinite(values["total"]):
            non_finite = [name for name, x in pending.parts.items() if not math.isfinite(float(x))]
            self._pending.clear()
            raise NonFiniteError(_non_finite_message(non_finite, pending.step, batch))
        if "weights" in values and not self._effect_known:
            self._check_effect(values, batch, objective)

    def _check_effect(
        self, values: Mapping[str, float], batch: Batch, objective: Objective
    ) -> None:
        no_effect, weights = has_no_effect(values), values["weights"]
        changed = self._weights is not None and weights != self._weights
        self._weights = weights if self._weights is None else self._weights
        self._effect_known = changed or not no_effect
        if not no_effect or not changed:
            return
        sites = objective.sites(batch.model, batch.inputs).names
        _log.warning(
            "dropout had no effect on the output of %s in two successive steps (u = 0 at %s%s): "
            "look for zero weights, a frozen adapter or a detach() after these sites.",
            type(batch.model).__name__,
            ", ".join(sites[:3]),
            f" and {len(sites) - 3} more" if len(sites) > 3 else "",
        )


def _known_finite(total: Tensor) -> bool:
    """Return whether a total is known to be finite without waiting for a device."""
    if type(total) is not Tensor or total.device.type != "cpu" or total.dtype == torch.bfloat16:
        return False
    return math.isfinite(total.detach().numpy())  # numpy is faster than torch here


def _non_finite_message(names: list[str], step: int, batch: Batch) -> str:
    """Return a message that names the non-finite parts and the first site with a non-finite h."""
    non_finite_sites: list[str] = []

    def check(site: Site, h: Tensor) -> Tensor:
        if not bool(torch.isfinite(h).all()):
            non_finite_sites.append(site.name)
        return h

    with torch.no_grad(), keep_statistics(batch.model), Interception(batch.model, check):
        batch.forward()
    *others, last = names or ["total"]
    parts = f"{', '.join(others)} and {last} parts are" if others else f"{last} part is"
    problem = f"the {parts} not finite at step {step}"
    if non_finite_sites:
        first = non_finite_sites[0]
        return f"{problem}: the first activation that is not finite is at site {first!r}."
    return (
        f"{problem}, but the activations at all sites are finite: look at the layers after the last "
        "site, the learning rate, or the inputs."
    )


_outputs_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def warn_of_unused_outputs(model: nn.Module, evaluation: Evaluation) -> None:
    """Log once per model which weights contribute to its outputs, but not to the loss."""
    if model in _outputs_checked:
        return
    _outputs_checked.add(model)
    outputs = [t for t in tensors_in(evaluation.output) if t.requires_grad]
    if len(outputs) < 2:
        return
    unused = _weights_of(outputs) - _weights_of([evaluation.total])
    names = [name for name, p in model.named_parameters() if id(p) in unused]
    if names:
        _log.warning(
            "the loss receives one of the %d outputs of %s, and %s get no gradient: to train them, set "
            "whole_output = True on the loss, which then receives everything that the model returns.",
            len(outputs),
            type(model).__name__,
            ", ".join(names[:3]) + (", …" if len(names) > 3 else ""),
        )


def _weights_of(tensors: list[Tensor]) -> set[int]:
    """Return the ids of all leaves in the graphs of the tensors."""
    pending: list[Any] = [t.grad_fn for t in tensors]
    visited: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            pending.extend(next_node for next_node, _ in node.next_functions)
    return {id(node.variable) for node in visited if hasattr(node, "variable")}
