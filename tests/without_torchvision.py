"""Import timm where torchvision is absent.

timm names torchvision as a requirement and uses it for data, not for models. The torchvision that
package indexes offer needs another build of torch than the pinned one: its operators do not load, and
it breaks the import of Transformers. So timm is installed without torchvision. While timm is imported,
an empty ``torchvision`` takes its place, and it is removed afterwards.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["import_timm"]


class _Anything(type):
    """A class that has every attribute, such as ``InterpolationMode.BICUBIC``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Empty(ModuleType):
    """A module in which every name is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def import_timm() -> ModuleType:
    """Import timm, with an empty torchvision where there is none.

    Raises:
        ImportError: if timm is not installed.
    """
    if "timm" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return importlib.import_module("timm")
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
