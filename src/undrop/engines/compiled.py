"""The stacked pass of a model that the user compiled, in compiled code."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from undrop.engines.stacked import NotStackable, PlanChanged, run_stacked
from undrop.torch_compat import compiled

_log = logging.getLogger("undrop")
_compiled: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()


def compiled_pass(model: nn.Module) -> Callable[..., Any]:
    """Return ``run_stacked``, compiled as one graph; eager, with one log line, if that fails.

    The mode that answers at each dropout is traced with the model, so that the graph holds the
    noise: it takes the noise as an input, and no graph is compiled twice for the same shapes.
    """
    if model not in _compiled:
        _compiled[model] = _guarded(
            torch.compile(_copied(run_stacked), fullgraph=True, dynamic=False)
        )
    return _compiled[model]


def _copied(function: Any) -> FunctionType:
    """Return the function with a code object of its own: torch limits the graphs of each one."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(model: nn.Module, *args: Any) -> Any:
        from torch._dynamo import exc
        from torch._dynamo.utils import counters

        try:
            with compiled():
                output, _ = run(model, *args)
            # Another branch, or another value that it depends on, makes another graph.
            return output, int(counters["stats"]["unique_graphs"])
        except (PlanChanged, NotStackable):
            raise
        except exc.FailOnRecompileLimitHit:
            reason = "more shapes than torch._dynamo.config.recompile_limit allows"
        except exc.TorchDynamoException as error:
            reason = f"it does not compile as one graph ({str(error).strip().splitlines()[0]})"
        _log.warning("undrop runs %s without torch.compile: %s.", type(model).__name__, reason)
        _compiled[model] = run_stacked
        return run_stacked(model, *args)

    return guarded
