"""Call a model on a batch, and find the tensor for the loss in the result."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrop.errors import OutputError
from undrop.intercept.pytrees import map_tensors, tensors_in
from undrop.torch_compat import fresh_autocast_cache


class Batch(NamedTuple):
    """A model and the data of one step."""

    model: nn.Module
    inputs: Any
    targets: Any
    compiled: bool = False
    """Whether the user compiled the model."""

    def forward(self) -> Any:
        """Return everything that the model returns for the inputs."""
        return call(self.model, self.inputs)


def call(model: nn.Module, inputs: Any) -> Any:
    """Return ``model(inputs)``; a tuple or list is spread over positions, a dict over keywords."""
    needs = _needs.get(model)
    if needs is None:
        return _call(model, inputs)
    copies = map_tensors(torch.clone, inputs) if needs.copies else inputs
    with torch.set_grad_enabled(needs.graph or torch.is_grad_enabled()):
        return _call(model, copies)


def _call(model: nn.Module, inputs: Any) -> Any:
    if torch.is_grad_enabled():
        return _spread(model, inputs)
    with fresh_autocast_cache():
        return _spread(model, inputs)


def _spread(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


class _Needs(NamedTuple):
    """What the passes of an unusual model have to respect."""

    copies: bool
    """It changes its inputs in place: every pass has a copy, so that all start from the same ones."""
    graph: bool
    """It needs gradients while it runs, since it returns a derivative or registers a hook."""


_needs: weakref.WeakKeyDictionary[nn.Module, _Needs] = weakref.WeakKeyDictionary()


class NeedsGraph(Exception):
    """The model needs gradients while it runs; the next call has them."""


def call_to_look(model: nn.Module, inputs: Any) -> Any:
    """Return ``model(inputs)`` without a graph, and keep what later calls have to respect.

    Raises:
        NeedsGraph: at most once for a model; its next call has a graph.
    """
    known = _needs.get(model, _Needs(copies=False, graph=False))
    copies = map_tensors(torch.clone, inputs)
    before, graph = _versions(copies), known.graph
    try:
        with torch.set_grad_enabled(graph):
            return _call(model, copies)
    except RuntimeError as error:
        said = str(error)
        if graph or not ("require" in said and "grad" in said):
            raise
        graph = True
        raise NeedsGraph from error
    finally:
        found = _Needs(known.copies or before != _versions(copies), graph)
        if any(found):
            _needs[model] = found


def _versions(tree: Any) -> list[int]:
    """How often each tensor was changed in place."""
    return [0 if t.is_inference() else t._version for t in tensors_in(tree)]


def logits_of(output: Any) -> Tensor:
    """Return the tensor that the loss sees: the output, its ``logits``, or its first element.

    Raises:
        OutputError: if there is none.
    """
    if isinstance(output, Tensor):
        return output
    logits = (
        output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    )
    if logits is None and isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if isinstance(logits, Tensor):
        return logits
    if getattr(output, "loss", None) is not None:
        raise OutputError(
            f"the model returned {type(output).__name__} with a loss but no logits, so that its output "
            "layer is fused with its loss: switch that off (in Liger fused_linear_cross_entropy=False), "
            "or return the features and pass loss=undrop.losses.LinearCrossEntropy(weight)."
        )
    raise OutputError(
        f"the model returned {type(output).__name__}, in which undrop finds no tensor for the loss: "
        "return a tensor, a tuple whose first element is one, or something with `logits`."
    )
