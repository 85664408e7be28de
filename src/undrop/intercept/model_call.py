"""Call a model on a batch, and find the tensors in its inputs and outputs.

Torch's pytrees handle tuples, lists, dicts and registered classes. In an object of any other class, this
module looks at the attributes, and at the items if the object is a mapping.
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


class _Field(NamedTuple):
    """An attribute or item of an object, with functions that read and write it."""

    read: Callable[[Any, Any], Any]
    write: Callable[[Any, Any, Any], None]
    name: Any


def _tensor_fields(x: Any) -> list[_Field]:
    """Return the fields of an object that contain tensors; none for a module: it is not data."""
    if isinstance(x, nn.Module):
        return []
    slots = [name for c in type(x).__mro__ for name in _slot_names(c) if hasattr(x, name)]
    names = [*slots, *getattr(x, "__dict__", ())]
    # object.__setattr__ also writes to frozen dataclasses.
    fields = [_Field(getattr, object.__setattr__, name) for name in names]
    if isinstance(x, MutableMapping):
        fields += [_Field(operator.getitem, operator.setitem, key) for key in x]
    return [f for f in fields if any(isinstance(t, Tensor) for t in tree_leaves(f.read(x, f.name)))]


def _slot_names(c: type) -> tuple[str, ...]:
    slots = c.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name != "__dict__")  # the names in it are read anyway


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield all tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
        return
    for leaf in tree_leaves(tree):
        fields = () if isinstance(leaf, Tensor) else _tensor_fields(leaf)
        values = [f.read(leaf, f.name) for f in fields]
        yield from (t for t in tree_leaves((leaf, values)) if isinstance(t, Tensor))


def map_tensors(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return the tree with each tensor replaced by the function's result; objects are copied.

    ``others`` are trees of the same structure. Their corresponding values are further arguments of the
    function.
    """
    if isinstance(tree, Tensor):
        return function(tree, *others)

    def on_tensor(x: Any, *matching: Any) -> Any:
        return function(x, *matching) if isinstance(x, Tensor) else x

    def on_leaf(x: Any, *matching: Any) -> Any:
        fields = () if isinstance(x, Tensor) else _tensor_fields(x)
        if not fields:
            return on_tensor(x, *matching)
        out = copy(x)
        for read, write, name in fields:
            write(out, name, tree_map(on_tensor, *(read(o, name) for o in (x, *matching))))
        return out

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
    """The position of this batch among the batches of a diagnosis."""

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
        return _call(model, inputs)  # compiled code is called within ``call_context``
    with call_context(model, inputs) as model_inputs:
        return _call(model, model_inputs)


@contextmanager
def call_context(model: nn.Module, inputs: Any) -> Iterator[Any]:
    """Yield the inputs for a call of the model, in a context that meets its requirements."""
    requirements = _requirements.get(model)
    if requirements is None:
        yield inputs
        return
    with torch.set_grad_enabled(requirements.grad or torch.is_grad_enabled()):
        yield map_tensors(torch.clone, inputs) if requirements.input_copies else inputs


def _call(model: nn.Module, inputs: Any) -> Any:
    try:
        with nullcontext() if torch.is_grad_enabled() else fresh_autocast_cache():
            args, kwargs = arguments(inputs)
            return model(*args, **kwargs)
    except Exception as error:
        if torch.compiler.is_compiling():
            raise
        if any(f.f_globals["__name__"] == _COND_MODULE for f, _ in walk_tb(error.__traceback__)):
            raise EngineError(
                f"{type(model).__name__} calls torch.cond, which traces its branches, so undrop "
                "can't follow them: use an if statement, or torch.where."
            ) from error
        raise


class _Requirements(NamedTuple):
    """The requirements of an unusual model for each of its calls."""

    input_copies: bool
    """The model changes its inputs in place, so each call gets a copy of them."""
    grad: bool
    """The model needs gradients in its forward pass: it returns a derivative or registers a hook."""


_requirements: weakref.WeakKeyDictionary[nn.Module, _Requirements] = weakref.WeakKeyDictionary()


class GradRequired(Exception):
    """The model needs gradients in its forward pass; the next call enables them."""


def call_and_record_requirements(model: nn.Module, inputs: Any) -> Any:
    """Return ``model(inputs)`` without a graph, and record the requirements for later calls.

    Raises:
        GradRequired: at most once per model, if it needs gradients; the next call has a graph.
    """
    known = _requirements.get(model, _Requirements(input_copies=False, grad=False))
    copies = map_tensors(torch.clone, inputs)
    before, grad = _versions(copies), known.grad
    try:
        with torch.set_grad_enabled(grad):
            return _call(model, copies)
    except RuntimeError as error:
        message = str(error)
        if grad or not ("require" in message and "grad" in message):
            raise
        grad = True
        raise GradRequired from error
    finally:
        changed = before != _versions(copies)
        requirements = _Requirements(known.input_copies or changed, grad)
        if any(requirements):
            _requirements[model] = requirements


def _versions(tree: Any) -> list[int]:
    """Return for each tensor how often it was changed in place."""
    return [0 if t.is_inference() else t._version for t in tensors_in(tree)]


def logits_of(output: Any) -> Tensor:
    """Return the tensor that the loss receives: the output, its ``logits``, or its first element."""
    if isinstance(output, Tensor):
        return output
    fields = output if isinstance(output, Mapping) else {"logits": getattr(output, "logits", None)}
    logits = fields.get("logits")
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
