"""The one way to extend undrop: typed registries that a decorator adds entries to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from undrop.errors import UnknownNameError

K = TypeVar("K")
V = TypeVar("V")
New = TypeVar("New")


class Registry(Mapping[K, V], Generic[K, V]):
    """A mapping that grows by ``@registry.register(key, …)``. Registering a key twice is an error.

    >>> LOSSES: Registry[str, type] = Registry("loss")
    >>> @LOSSES.register("mse")
    ... class MSE: ...
    >>> LOSSES["mse"].__name__
    'MSE'

    Args:
        kind: what the entries are, for error messages.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.about: dict[K, str] = {}
        self._entries: dict[K, V] = {}

    def register(self, *keys: K, about: str = "") -> Callable[[New], New]:
        """Return a decorator that adds what it decorates under each key, with a line ``about`` it."""

        def add(value: New) -> New:
            for key in dict.fromkeys(keys):
                if key in self._entries:
                    raise ValueError(f"{key!r} is already registered as a {self.kind}.")
                self._entries[key] = value  # type: ignore[assignment]
                self.about[key] = about
            return value

        return add

    def __getitem__(self, key: K) -> V:
        """Return an entry; if there is none, the error names the nearest key and lists all of them."""
        try:
            return self._entries[key]
        except KeyError:
            raise UnknownNameError(self.kind, str(key), map(str, self._entries)) from None

    def find(self, key: K) -> V | None:
        """Return an entry, or None if there is none."""
        return self._entries.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
