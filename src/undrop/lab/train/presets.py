"""Presets: named settings in TOML files, undrop's or your own, and the rules for overriding them."""

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

_NAMED = ("model", "objective")
"""The sections whose options belong to the name in the section."""


def presets() -> list[str]:
    """Return the names of all presets."""
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
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad TOML, a zero byte in the path
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def preset(name: str) -> dict[str, Any]:
    """Return the settings of a preset, merged with those of the preset that it extends.

    Args:
        name: one of ``presets()``, or the path of your own file, which ends in ``.toml``.

    Raises:
        UnknownNameError: if no preset has that name, or the name that it extends.
        ConfigError: if the file does not exist or is not valid TOML.
    """
    values = _read_own(name) if name.endswith(".toml") else _read(name)
    values.pop("description", None)
    base = values.pop("extends", None)
    settings = merge(preset(_named(base, name)), values) if base is not None else values
    return {**settings, "preset": name}


def _named(base: object, name: str) -> str:
    """Return the name of the preset that another one extends: one of undrop's, so no cycles."""
    if not isinstance(base, str):
        raise ConfigError(f"extends in {name} must be the name of a preset, got {base!r}.")
    if base not in presets():
        raise UnknownNameError("preset", base, presets(), f" for {name} to extend")
    return base


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``base``, overridden by those of ``over``.

    If ``over`` names another model or objective, the options of the previous one are dropped.
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
    """Turn ``"optimizer.lr=5"`` into nested settings.

    The value is read as TOML or ``null``; anything else is a string.

    Raises:
        ConfigError: if the text is not of the form ``section.key=value``.
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
    except (ValueError, RecursionError):  # not TOML, or an integer of thousands of digits
        return text


def configure(
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
) -> Config:
    """Return a config from a preset, settings that override it, and ``section.key=value`` overrides.

    Raises:
        ConfigError: naming the first setting that is unknown or outside its range.
    """
    values = preset(name) if name is not None else {}
    for layer in [settings or {}, *map(parse_override, overrides)]:
        values = merge(values, layer)
    return Config.parse(values)
