"""Compile the stacked pass of a model that the user has compiled."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from undrop.engines.plan import NotStackable, PlanChanged
from undrop.engines.stacked import run_stacked
from undrop.intercept.model_call import call_context
from undrop.torch_compat import Backend, allow_compiled

_log = logging.getLogger("undrop")
_compiled: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()


def compiled_pass(model: nn.Module, backend: Backend) -> Callable[..., Any]:
    """Return ``run_stacked`` compiled as one graph; if it can't be, it runs eagerly and logs the reason.

    The interception is traced together with the model, and the noise is an input of the graph. So one
    graph serves all steps with the same shapes.
    """
    if model not in _compiled:
        _compiled[model] = _eager_if_it_fails(
            torch.compile(_copy(run_stacked), fullgraph=True, dynamic=False, backend=backend)
        )
    return _compiled[model]


def _copy(function: Any) -> FunctionType:
    """Copy a function with its code object, since torch limits the number of graphs per code object."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _eager_if_it_fails(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_or_fall_back(model: nn.Module, *args: Any) -> Any:
        *others, inputs = args
        from torch._dynamo import exc
        from torch._dynamo.utils import counters

        try:
            # Compiled code must not read the dictionary of all models' requirements: torch guards what
            # it reads, and fails if another model is deleted while it traces.
            with allow_compiled(), call_context(model, inputs) as model_inputs:
                output, _ = run(model, *others, model_inputs)
            # The number of graphs is the trail: a new branch, or a new value that a graph depends on,
            # makes a new graph.
            return output, int(counters["stats"]["unique_graphs"])
        except (PlanChanged, NotStackable):
            raise
        except exc.FailOnRecompileLimitHit:
            reason = "more shapes than torch._dynamo.config.recompile_limit allows"
        except exc.TorchDynamoException as error:
            reason = f"it does not compile as one graph ({_reason(error)})"
        # If the plan has changed, as with another p, this raises the exception that torch only reports.
        output = run_stacked(model, *args)
        _log.warning("undrop runs %s without torch.compile: %s.", type(model).__name__, reason)
        _compiled[model] = run_stacked
        return output

    return run_or_fall_back


def _reason(error: BaseException) -> str:
    """Return the first line of an error, and the first line of compiler output that reports an error."""
    lines = str(getattr(error, "inner_exception", error)).strip().splitlines()
    reported = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return ": ".join([*(line.rstrip(".") for line in lines[:1]), *reported[:1]])
