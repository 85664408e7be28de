"""Running statistics of normalization layers: a step of several passes updates them once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

_known: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = (
    weakref.WeakKeyDictionary()
)


def _norms(model: nn.Module) -> list[nn.Module]:
    """Return the normalization layers of a model; they are looked up once, not at every step."""
    if model not in _known:
        # recognized by their buffers: a layer in TorchScript has another class
        norms = (m for m in model.modules() if "running_mean" in m._buffers)
        _known[model] = [weakref.ref(module) for module in norms]
    return [module for ref in _known[model] if (module := ref()) is not None]


class Statistics:
    """A copy of the running statistics of a model's normalization layers, and of other buffers."""

    def __init__(self, model: nn.Module, others: Iterable[Tensor] = ()) -> None:
        own = (b for m in _norms(model) for b in m.buffers(recurse=False))
        self._saved = [(b, b.clone()) for b in (*own, *others)]

    def restore(self) -> None:
        """Restore the saved values."""
        with torch.no_grad():
            for buffer, value in self._saved:
                buffer.copy_(value)


def keep_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """Make passes update copies of the running statistics, not the statistics themselves.

    So a step of several passes updates them once, in the pass outside this block. (Restoring the old
    values would not be enough: the graph of the first pass holds the buffers.)
    """
    return _copied_buffers(_norms(model))


Buffers = list[dict[str, Tensor]]


def copied_buffers(model: nn.Module) -> Buffers:
    """Return a copy of every buffer, module by module."""
    return _copies(list(model.modules()))


def keep_buffers(model: nn.Module, values: Buffers | None = None) -> AbstractContextManager[None]:
    """Make passes update copies of all buffers, which start from ``values`` if they are given."""
    return _copied_buffers(list(model.modules()), values)


def _copies(modules: list[nn.Module]) -> Buffers:
    return [{k: b.clone() for k, b in m._buffers.items() if b is not None} for m in modules]


@contextmanager
def _copied_buffers(modules: list[nn.Module], values: Buffers | None = None) -> Iterator[None]:
    originals = [dict(m._buffers) for m in modules]
    copies = _copies(modules) if values is None else values
    try:
        _put(modules, copies)
        yield
    finally:
        _put(modules, originals)  # a buffer that the pass registered stays: its module needs it


def _put(modules: list[nn.Module], values: Sequence[Mapping[str, Tensor | None]]) -> None:
    for module, buffers in zip(modules, values, strict=True):
        for name, buffer in buffers.items():
            module._buffers[name] = buffer  # a scripted module has no ``update`` there
