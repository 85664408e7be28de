"""The tensors in the inputs and outputs of a model, in containers of any class.

Torch knows tuples, lists, dicts and the classes that were registered with it. An object of any other
class holds what its attributes hold, or its items if it is a mapping of its own kind.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, MutableMapping
from copy import copy
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


class _Place(NamedTuple):
    """Where an object holds something: how to read it, how to write it, and its name there."""

    read: Callable[[Any, Any], Any]
    write: Callable[[Any, Any, Any], None]
    name: Any


def _places(x: Any) -> list[_Place]:
    """All places of an object that hold tensors; none for a module, whose tensors are not data."""
    if isinstance(x, nn.Module):
        return []
    slots = [name for c in type(x).__mro__ for name in _slots(c) if hasattr(x, name)]
    names = [*slots, *getattr(x, "__dict__", ())]
    places = [_Place(getattr, object.__setattr__, name) for name in names]  # frozen ones as well
    if isinstance(x, MutableMapping):
        places += [_Place(operator.getitem, operator.setitem, key) for key in x]
    return [p for p in places if any(isinstance(t, Tensor) for t in tree_leaves(p.read(x, p.name)))]


def _slots(c: type) -> tuple[str, ...]:
    slots = c.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name != "__dict__")  # whose names are looked up anyway


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors that a tree holds."""
    if isinstance(tree, Tensor):
        yield tree
        return
    for leaf in tree_leaves(tree):
        held = leaf if isinstance(leaf, Tensor) else [p.read(leaf, p.name) for p in _places(leaf)]
        yield from (t for t in tree_leaves(held) if isinstance(t, Tensor))


def map_tensors(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The tree with the function's answer in each tensor's place; objects are copied, not changed.

    Args:
        function: takes a tensor, and what stands in its place in each of the others.
        tree: what a model takes or returns.
        others: trees of the same structure.
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
