"""Call a model on a batch, and find tensors in what it takes and returns, in containers of any class.

Torch's trees have tuples, lists, dicts and registered classes as nodes. In an object of any other class,
this module looks at the attributes, and at the items if it is a mapping.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from undrop.errors import EngineError, OutputError
from undrop.torch_compat import Backend, fresh_autocast_cache

_COND_MODULE = "torch._higher_order_ops.cond"


class _Place(NamedTuple):
    """An attribute or item of an object that contains tensors: how to read and write it, its name."""

    read: Callable[[Any, Any], Any]
    write: Callable[[Any, Any, Any], None]
    name: Any


def _places(x: Any) -> list[_Place]:
    """Return where an object contains tensors; nowhere for a module, whose tensors are not data."""
    if isinstance(x, nn.Module):
        return []
    slots = [name for c in type(x).__mro__ for name in _slots(c) if hasattr(x, name)]
    names = [*slots, *getattr(x, "__dict__", ())]
    # object.__setattr__ also writes to frozen dataclasses.
    places = [_Place(getattr, object.__setattr__, name) for name in names]
    if isinstance(x, MutableMapping):
        places += [_Place(operator.getitem, operator.setitem, key) for key in x]
    return [p for p in places if any(isinstance(t, Tensor) for t in tree_leaves(p.read(x, p.name)))]


def _slots(c: type) -> tuple[str, ...]:
    slots = c.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name != "__dict__")  # its names are looked up separately


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield all tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
        return
    for leaf in tree_leaves(tree):
        held = leaf if isinstance(leaf, Tensor) else [p.read(leaf, p.name) for p in _places(leaf)]
        yield from (t for t in tree_leaves(held) if isinstance(t, Tensor))


def map_tensors(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return the tree with each tensor replaced by the function's result; objects are copied.

    The function also gets the values at the same place in ``others``, trees of the same structure.
    """
    if isinstance(tree, Tensor):
        return function(tree, *others)

    def on_tensor(x: Any, *same: Any) -> Any:
        return function(x, *same) if isinstance(x, Tensor) else x

    def on_leaf(x: Any, *same: Any) -> Any:
        places = () if isinstance(x, Tensor) else _places(x)
        if not places:
            return on_tensor(x, *same)
        made = copy(x)
        for read, write, name in places:
            write(made, name, tree_map(on_tensor, *(read(o, name) for o in (x, *same))))
        return made

    return tree_map(on_leaf, tree, *others)


class Batch(NamedTuple):
    """A model, the data of one step, and the loss for it."""

    model: nn.Module
    inputs: Any
    targets: Any
    backend: Backend | None = None
    """The backend of ``torch.compile``, if the user compiled the model."""
    loss: Any = None
    """The loss of the outputs and the targets."""
    number: int = 0
    """Its position among the batches of a diagnosis."""

    def forward(self) -> Any:
        """Return everything that the model returns for the inputs."""
        return call(self.model, self.inputs)


def arguments(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the positional arguments (from a tuple or list) and the keyword arguments (from a dict)."""
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def call(model: nn.Module, inputs: Any) -> Any:
    """Return what the model returns for these inputs."""
    if torch.compiler.is_compiling():
        return _call(model, inputs)  # the caller of the compiled code meets the model's needs
    with call_context(model, inputs) as usable:
        return _call(model, usable)


@contextmanager
def call_context(model: nn.Module, inputs: Any) -> Iterator[Any]:
    """Yield inputs that the model may change, in a context with gradients if it needs them."""
    needs = _needs.get(model)
    if needs is None:
        yield inputs
        return
    with torch.set_grad_enabled(needs.graph or torch.is_grad_enabled()):
        yield map_tensors(torch.clone, inputs) if needs.copies else inputs


def _call(model: nn.Module, inputs: Any) -> Any:
    try:
        with nullcontext() if torch.is_grad_enabled() else fresh_autocast_cache():
            args, kwargs = arguments(inputs)
            return model(*args, **kwargs)
    except Exception as error:
        if any(f.f_globals["__name__"] == _COND_MODULE for f, _ in walk_tb(error.__traceback__)):
            raise EngineError(
                f"{type(model).__name__} calls torch.cond, which traces its branches, so undrop "
                "can't follow them: use an if statement, or torch.where."
            ) from error
        raise


class _Needs(NamedTuple):
    """What an unusual model needs in every pass."""

    copies: bool
    """It changes its inputs in place: every pass gets a copy, so that all start from the same inputs."""
    graph: bool
    """It needs gradients while it runs, because it returns a derivative or registers a hook."""


_needs: weakref.WeakKeyDictionary[nn.Module, _Needs] = weakref.WeakKeyDictionary()


class NeedsGraph(Exception):
    """The model needs gradients while it runs; the next call has them."""


def call_noting_needs(model: nn.Module, inputs: Any) -> Any:
    """Return ``model(inputs)`` without a graph, and note what the model needs in later calls.

    It raises ``NeedsGraph`` at most once per model; the next call has a graph.
    """
    known = _needs.get(model, _Needs(copies=False, graph=False))
    copies = map_tensors(torch.clone, inputs)
    before, graph = _versions(copies), known.graph
    try:
        with torch.set_grad_enabled(graph):
            return _call(model, copies)
    except RuntimeError as error:
        message = str(error)
        if graph or not ("require" in message and "grad" in message):
            raise
        graph = True
        raise NeedsGraph from error
    finally:
        found = _Needs(known.copies or before != _versions(copies), graph)
        if any(found):
            _needs[model] = found


def _versions(tree: Any) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [0 if t.is_inference() else t._version for t in tensors_in(tree)]


def logits_of(output: Any) -> Tensor:
    """Return the tensor that the loss receives: the output, its ``logits``, or its first element."""
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
            f"the model returned {type(output).__name__} with a loss but no logits, so its output "
            "layer is fused with its loss: switch that off (in Liger fused_linear_cross_entropy=False), "
            "or return the features and pass loss=undrop.losses.LinearCrossEntropy(weight)."
        )
    raise OutputError(
        f"the model returned {type(output).__name__}, in which undrop finds no tensor for the loss: "
        "return a tensor, a tuple whose first element is one, or something with `logits`."
    )
