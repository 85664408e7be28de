"""What a person needs of a validation error: the setting, the value, the range."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pydantic import ValidationError

from undrop.errors import ConfigError, UnknownNameError

__all__ = ["sentence", "unknown"]

_SHOULD = "Input should be "


def sentence(
    error: ValidationError,
    known: Callable[[Sequence[str]], Iterable[str]],
    within: Sequence[str] = (),
) -> ConfigError:
    """The first thing that is wrong, as one sentence.

    Args:
        error: what pydantic says.
        known: gives the names there are in a section, from its path.
        within: the path of the section that was validated.
    """
    first = error.errors(include_url=False, include_context=False)[0]
    place = [*within, *map(str, first["loc"])]
    name, told = ".".join(place), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return unknown(place, known(place[:-1]))
    if first["type"] == "missing":
        return ConfigError(f"{name} must be given.")
    if told.startswith(_SHOULD):
        return ConfigError(f"{name} must be {told.removeprefix(_SHOULD)}, got {first['input']!r}.")
    return ConfigError(told)


def unknown(place: Sequence[str], known: Iterable[str]) -> ConfigError:
    """No setting has that name."""
    names = [".".join([*place[:-1], name]) for name in known]
    return ConfigError(str(UnknownNameError("setting", ".".join(place), names)))
