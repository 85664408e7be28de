"""Finding outputs of a model that the loss does not see, and whose weights get no gradient."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import Tensor, nn

from undrop.engines import Evaluation
from undrop.intercept import tensors_in

_log = logging.getLogger("undrop")


_seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def look_at_heads(model: nn.Module, evaluation: Evaluation) -> None:
    """Log once which weights of a model contribute to its output, but not to the loss."""
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
            "the loss sees one of the %d outputs of %s, and %s get no gradient: to train them, set "
            "whole_output = True on the loss, which then receives all that the model returns.",
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
