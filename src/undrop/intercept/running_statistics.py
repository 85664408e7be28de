"""Running statistics of normalization layers: a step of several passes updates them once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

_norm_layers: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = (
    weakref.WeakKeyDictionary()
)
"""The normalization layers of each model: looked up once, not at every step."""


def _norm_layers_of(model: nn.Module) -> list[nn.Module]:
    if model not in _norm_layers:
        # Look at the buffers, because a layer in TorchScript has another class.
        layers = (m for m in model.modules() if "running_mean" in m._buffers)
        _norm_layers[model] = [weakref.ref(module) for module in layers]
    return [module for ref in _norm_layers[model] if (module := ref()) is not None]


class Statistics:
    """A copy of the running statistics of a model's normalization layers, and of other buffers."""

    def __init__(self, model: nn.Module, others: Iterable[Tensor] = ()) -> None:
        statistics = (b for m in _norm_layers_of(model) for b in m.buffers(recurse=False))
        self._saved = [(b, b.clone()) for b in (*statistics, *others)]

    def restore(self) -> None:
        """Restore the saved values."""
        with torch.no_grad():
            for buffer, value in self._saved:
                buffer.copy_(value)


def keep_statistics(model: nn.Module) -> AbstractContextManager[None]:
    """Make passes update copies of the running statistics, not the statistics themselves.

    So a step of several passes updates them once, in the pass outside of this context. Restoring the old
    values in place would not be enough: the graph of the first pass contains the buffers.
    """
    return _with_copies(_norm_layers_of(model))


Buffers = list[dict[str, Tensor]]


def copied_buffers(model: nn.Module) -> Buffers:
    """Return a copy of every buffer, module by module."""
    return _copies(list(model.modules()))


def keep_buffers(model: nn.Module, values: Buffers | None = None) -> AbstractContextManager[None]:
    """Make passes update copies of all buffers, or ``values`` in place of copies."""
    return _with_copies(list(model.modules()), values)


def _copies(modules: list[nn.Module]) -> Buffers:
    return [{k: b.clone() for k, b in m._buffers.items() if b is not None} for m in modules]


@contextmanager
def _with_copies(modules: list[nn.Module], values: Buffers | None = None) -> Iterator[None]:
    originals = [dict(m._buffers) for m in modules]
    copies = _copies(modules) if values is None else values
    try:
        _set_buffers(modules, copies)
        yield
    finally:
        # A buffer that the pass registered stays: its module needs it.
        _set_buffers(modules, originals)


def _set_buffers(modules: list[nn.Module], values: Sequence[Mapping[str, Tensor | None]]) -> None:
    for module, buffers in zip(modules, values, strict=True):
        for name, buffer in buffers.items():
            module._buffers[name] = buffer  # ``_buffers`` of a scripted module has no ``update``
