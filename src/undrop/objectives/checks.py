"""Check every step: the total is finite, dropout has an effect, and the loss uses every output.

A step never waits for the device. If dropout has no effect, because the noise of every site is lost
before the output, one log line says so.
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
"""The sizes of uᵀHu and ∂ℓ/∂ε, relative to the loss, that rounding alone can cause."""


def fingerprint(parameters: Sequence[Tensor]) -> Tensor:
    """Return a number that changes with the weights; sparse weights have no norm and do not count."""
    dense = [p.detach() for p in parameters if p.layout is torch.strided]
    if not dense:  # only the inputs are trained
        return torch.zeros(())
    norms = torch._foreach_norm(dense, 1)
    dtype = torch.float32 if norms[0].device.type == "mps" else torch.float64  # MPS has no float64
    return torch.stack([norm.to(dtype) for norm in norms]).sum()


def has_no_effect(parts: Mapping[str, float]) -> bool:
    """Return whether the regularizers of a step are 0, up to rounding."""
    if not {"explicit", "implicit"} & parts.keys():
        return False
    loss = abs(parts.get("loss", 0.0))
    explicit, implicit = abs(parts.get("explicit", 0.0)), abs(parts.get("implicit", 0.0))
    return explicit <= _EXPLICIT * loss and implicit <= _IMPLICIT * loss


class _Pending(NamedTuple):
    step: int
    names: list[str]
    values: Tensor  # on the host; valid once the event ``arrived`` has completed
    arrived: Any
    parts: Mapping[str, Tensor]


class StepCheck:
    """Checks that the parts of every evaluation are finite, and that dropout has an effect (u ≠ 0).

    On the CPU it reads them at once. From another device it copies them to the host in the background,
    and checks the copy at a later step, when it has arrived: a step never waits for the device.

    One step with u = 0 is normal: LoRA starts with B = 0. If u is still 0 after the weights have
    changed, one warning says so. Micro-batches of one step, and steps with a learning rate of 0, do
    not count.
    """

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        self._effect_known = False  # if True, the question is settled; stop checking
        self._weights: float | None = None  # at the first step without an effect

    def add(self, step: int, evaluation: Evaluation, batch: Batch, objective: Objective) -> None:
        """Check the parts of an evaluation, at once or when they have arrived from the device.

        A ``NonFiniteError`` names the parts, the step and the first site with non-finite values.
        """
        tensors = {"total": evaluation.total}
        effect_unknown = self._effect_unknown(evaluation, batch)
        if not effect_unknown and _known_finite(evaluation.total):
            return
        if effect_unknown:
            weights = fingerprint(objective.trainable_parameters(batch.model))
            tensors |= {**evaluation.parts, "weights": weights}
        held = [x.detach() for x in tensors.values()]
        values = (
            torch.stack([x.float() for x in held]) if len(held) > 1 else held[0].float().view(1)
        )
        names, parts = list(tensors), evaluation.parts
        if values.device.type == "cpu":
            self._check(_Pending(step, names, values, None, parts), batch, objective)
            return
        host = values.to("cpu", non_blocking=True)
        event = torch.get_device_module(values.device).Event()
        event.record()
        self._pending.append(_Pending(step, names, host, event, parts))
        while self._pending and self._pending[0].arrived.query():
            self._check(self._pending.popleft(), batch, objective)

    def _effect_unknown(self, evaluation: Evaluation, batch: Batch) -> bool:
        """Return whether the evaluation has regularizers that have had no effect so far."""
        if self._effect_known:
            return False
        analytic = "loss" in evaluation.parts and {"explicit", "implicit"} & evaluation.parts.keys()
        return bool(analytic) and not is_sharded(batch.model)

    def _check(self, pending: _Pending, batch: Batch, objective: Objective) -> None:
        numbers = pending.values.numpy().tolist()  # host memory: no operation of torch
        values = dict(zip(pending.names, numbers, strict=True))
        if not math.isfinite(values["total"]):
            bad = [name for name, x in pending.parts.items() if not math.isfinite(float(x))]
            self._pending.clear()
            raise NonFiniteError(_message(bad, pending.step, batch))
        if "weights" in values and not self._effect_known:
            self._check_effect(values, batch, objective)

    def _check_effect(
        self, values: Mapping[str, float], batch: Batch, objective: Objective
    ) -> None:
        changed = self._weights is not None and values["weights"] != self._weights
        self._effect_known = changed or not has_no_effect(values)
        if self._weights is None:
            self._weights = values["weights"]
        if not has_no_effect(values) or not changed:
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
    """Return whether a total on the CPU is finite; False if this is not known at once."""
    if type(total) is not Tensor or total.device.type != "cpu" or total.dtype == torch.bfloat16:
        return False
    return math.isfinite(total.detach().numpy())  # host memory: no operation of torch


def _message(bad: list[str], step: int, batch: Batch) -> str:
    """Return a message that names the non-finite parts, and the first site with such an activation."""
    reached: list[str] = []

    def check(site: Site, h: Tensor) -> Tensor:
        if not reached and not bool(torch.isfinite(h).all()):
            reached.append(site.name)
        return h

    with torch.no_grad(), keep_statistics(batch.model), Interception(batch.model, check):
        batch.forward()
    *others, last = bad or ["total"]
    parts = f"{', '.join(others)} and {last} parts are" if others else f"{last} part is"
    what = f"the {parts} not finite at step {step}"
    if reached:
        return f"{what}: the first activation that is not finite is at site {reached[0]!r}."
    return (
        f"{what}, but the activations at all sites are finite: look at the layers after the last site, "
        "the learning rate, or the inputs."
    )


_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def warn_of_unused_outputs(model: nn.Module, evaluation: Evaluation) -> None:
    """Log once per model which weights contribute to its outputs, but not to the loss."""
    if model in _seen:
        return
    _seen.add(model)
    outputs = [t for t in tensors_in(evaluation.output) if t.requires_grad]
    if len(outputs) < 2:
        return
    unused = _weights_of(outputs) - _weights_of([evaluation.total])
    names = [name for name, p in model.named_parameters() if id(p) in unused]
    if names:
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        _log.warning(
            "the loss receives one of the %d outputs of %s, and %s get no gradient: to train them, set "
            "whole_output = True on the loss, which then receives everything that the model returns.",
            len(outputs),
            type(model).__name__,
            some,
        )


def _weights_of(tensors: list[Tensor]) -> set[int]:
    """Return the ids of all leaves in the graphs of the tensors."""
    waiting: list[Any] = [t.grad_fn for t in tensors]
    seen: set[Any] = set()
    found: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(next_node for next_node, _ in node.next_functions)
    return found
