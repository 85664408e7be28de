"""The models and objectives that a config can name, and their options.

The options of a component, which is a model or an objective, are the arguments of its constructor. No
other place lists them: a config is checked against the signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError, ValidationError
from pydantic_core.core_schema import ValidationInfo

from undrop.errors import ConfigError, UnknownNameError
from undrop.registry import Registry

_TRAINER_ARGUMENTS = {"vocab_size", "generator", "loss", "batch_dim"}
"""The constructor arguments that the trainer passes. A config can't set them."""

_JSON_TYPES: dict[str, Any] = {
    "engine": str,
    "strength": float,
    "sites": str | list[str] | dict[str, float] | None,
}
"""The types that a config accepts for options whose Python types JSON can't express."""

_MAX_VALUE_LENGTH = 60  # characters of a value in an error message


class Settings(BaseModel):
    """Named settings. Unknown names, infinite numbers and integers beyond 64 bits are errors.

    A boolean is not accepted as a number.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _check_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        types = _types_in(cls.model_fields[str(info.field_name)].annotation)
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, bool) and types & {int, float} and not types & {bool, Any}:
                raise PydanticCustomError("boolean", "Input should be a number and not a boolean")
            if isinstance(item, int) and abs(item) >= 2**63:
                raise PydanticCustomError("int_size", "Input should be a smaller number")
        return value


def _types_in(annotation: Any) -> set[Any]:
    """Return all types that an annotation mentions."""
    if isinstance(annotation, str | int | float):  # a value of a Literal
        return set()
    return {annotation}.union(*map(_types_in, get_args(annotation)))


class Component(BaseModel):
    """A component of a registry: its name and all its options, which are checked."""

    model_config = ConfigDict(extra="allow", frozen=True)
    registry: ClassVar[Registry[str, Any]]
    required: ClassVar[str]
    """The constructor argument that every component has, because the trainer passes it."""

    name: str

    @model_validator(mode="before")
    @classmethod
    def _check_options(cls, values: Any) -> Any:
        """Check the options, and add the defaults of all options that are not set."""
        if not isinstance(values, Mapping):
            return values
        section, name = cls.registry.kind, values.get("name", cls.model_fields["name"].default)
        if not isinstance(name, str):
            raise ConfigError(f"{section}.name must be a string, got {_short_repr(name)}.")
        options_model = _options_model(cls.registry[name], cls.required)
        options = {key: value for key, value in values.items() if key != "name"}
        try:
            checked = options_model.model_validate(options)
        except ValidationError as error:
            raise as_config_error(error, options_model, [section]) from None
        return {"name": name, **checked.model_dump(mode="json")}

    @property
    def options(self) -> dict[str, Any]:
        """The options, without the name."""
        return dict(self.model_extra or {})

    def build(self, **arguments: Any) -> Any:
        """Call the constructor with the options, and with those ``arguments`` that it takes."""
        factory = self.registry[self.name]
        parameters = inspect.signature(factory).parameters
        accepted = {key: value for key, value in arguments.items() if key in parameters}
        return factory(**self.options, **accepted)


@cache
def _options_model(factory: Callable[..., Any], required: str) -> type[BaseModel]:
    """Return a pydantic model of a constructor's options; creating it takes milliseconds.

    Raises:
        ConfigError: if the constructor has no argument ``required``, or one that can't be checked.
    """
    target = factory.func if isinstance(factory, partial) else factory
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    parameters = inspect.signature(factory).parameters
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in _TRAINER_ARGUMENTS:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(
                f"{target.__name__} has the argument {str(parameter).partition(':')[0]}, which has no "
                f"names for a config: write the arguments out in its place, such as {required}."
            )
        if name not in hints and name not in _JSON_TYPES:
            raise ConfigError(
                f"the argument {name!r} of {target.__name__} has no annotation, so a config can't check "
                f"it: annotate it, such as {name}: float."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (_JSON_TYPES.get(name) or hints[name], default)
    if required not in parameters:
        raise ConfigError(
            f"{target.__name__} has no argument {required!r}, which the trainer passes: add it to the "
            "constructor."
        )
    model: type[BaseModel] = create_model("Options", __base__=Settings, **fields)
    return model


def as_config_error(
    error: ValidationError, model: type[BaseModel], section: Sequence[str] = ()
) -> ConfigError:
    """Return the first error of a validation as one sentence with the setting, its value and its range.

    Args:
        error: pydantic's error.
        model: the pydantic model that refused the settings.
        section: the path of the settings in the config.
    """
    problems = error.errors(include_url=False, include_context=False)
    # Unknown settings come first: a required setting that is misspelled is also missing.
    problem = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    path = [*section, *map(str, problem["loc"])]
    name, kind = ".".join(path), problem["type"]
    text = problem["msg"].partition(", unable to parse")[0]  # the rest repeats this in other words
    if kind == "extra_forbidden":
        names = [".".join([*path[:-1], key]) for key in _setting_names(model, problem["loc"][:-1])]
        return ConfigError(str(UnknownNameError("setting", name, names)))
    if kind == "missing":
        return ConfigError(f"{name} must be given.")
    if kind == "value_error":
        return ConfigError(text.removeprefix("Value error, "))
    expected = "a smaller number" if "_size" in kind else text.removeprefix("Input should be ")
    return ConfigError(f"{name} must be {expected}, got {_short_repr(problem['input'])}.")


def _setting_names(model: Any, path: Sequence[str | int]) -> list[str]:
    """Return the names of the settings in the section of a model at ``path``."""
    for part in path:
        model = model.model_fields[part].annotation
    return list(model.model_fields)


def _short_repr(value: object) -> str:
    """Return ``repr(value)``, shortened for an error message."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number with thousands of digits"
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}…"
