"""Named settings (TOML files, the package's or one's own) and how settings are laid over each other."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from undrop.errors import ConfigError, UnknownNameError
from undrop.lab.train.config import Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["configure", "describe", "merge", "parse_override", "preset", "presets"]

_NAMED = ("model", "objective")
"""The sections whose options belong to the name in them."""


def presets() -> list[str]:
    """The names of all presets."""
    files = (file.name for file in (resources.files("undrop") / "presets").iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def _read(name: str) -> dict[str, Any]:
    if name not in presets():
        raise UnknownNameError("preset", name, presets())
    file = resources.files("undrop") / "presets" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _read_own(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the preset {path} can't be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad TOML, a path with a zero in it
        raise ConfigError(f"{path} is no TOML: {error}.") from None


def describe(name: str) -> str:
    """A preset's own line of description."""
    return str(_read(name)["description"])


def preset(name: str) -> dict[str, Any]:
    """A preset's settings, laid over those of the one it extends.

    Args:
        name: one of ``presets()``, or the path of a file of one's own, which ends in ``.toml``.

    Raises:
        UnknownNameError: if there is none of that name, or of that which it extends.
        ConfigError: if there is no such file, or no TOML in it.
    """
    values = _read_own(name) if name.endswith(".toml") else _read(name)
    values.pop("description", None)
    base = values.pop("extends", None)
    settings = merge(preset(_named(base, name)), values) if base is not None else values
    return {**settings, "preset": name}


def _named(base: object, name: str) -> str:
    """What a preset extends: one of the package's, which does not lead back to it."""
    if not isinstance(base, str):
        raise ConfigError(f"what {name} extends must be the name of a preset, got {base!r}.")
    if base not in presets():
        raise UnknownNameError("preset", base, presets(), f" for {name} to extend")
    return base


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ``base`` with those of ``over`` laid over them.

    Where another model or objective is named, the options of the former one are gone with it.
    """
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if not isinstance(value, Mapping) or not isinstance(old, Mapping):
            result[key] = value
        elif key in _NAMED and value.get("name", old.get("name")) != old.get("name"):
            result[key] = dict(value)
        else:
            result[key] = {**old, **value}
    return result


def parse_override(text: str) -> dict[str, Any]:
    """``"optimizer.lr=5"`` as nested settings; the value is TOML's, ``null``, or else a string.

    Raises:
        ConfigError: if there is no ``section.key=value`` in it.
    """
    path, equals, value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set takes section.key=value, such as optimizer.lr=5, got {text!r}.")
    return {section: {key: _value(value.strip())}}


def _value(text: str) -> Any:
    if text == "null":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def configure(
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
) -> Config:
    """A config from a preset, settings laid over it, and ``section.key=value`` over both.

    Raises:
        ConfigError: naming the first setting that is unknown or outside its range.
    """
    values = preset(name) if name is not None else {}
    for layer in [settings or {}, *map(parse_override, overrides)]:
        values = merge(values, layer)
    return Config.parse(values)
