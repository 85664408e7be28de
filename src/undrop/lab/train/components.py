"""The models and objectives that a config can name, and the options that each one takes.

The options of a component are the arguments of its constructor, which is the only place that lists
them: a config is checked against the signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, get_args, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from undrop import objectives
from undrop.errors import ConfigError, UnknownNameError
from undrop.objectives import Objective
from undrop.registry import Registry

OBJECTIVES: Registry[str, Callable[..., Objective]] = Registry("objective")
"""The objectives; the paper's variants are the same classes with other defaults."""

OBJECTIVES.register("none", about="The loss alone, with every dropout of the model switched off")(
    objectives.NoRegularization
)
OBJECTIVES.register(
    "l2", about="The loss plus weight · Σ ‖W‖² over all trainable parameters, without dropout"
)(partial(objectives.L2, weight=1e-5))
OBJECTIVES.register(
    "dropout", about="Plain dropout; the option k averages the loss over k masks (Algorithm 1)"
)(objectives.Dropout)
OBJECTIVES.register("drop-k", about="Dropout averaged over k = 8 masks")(
    partial(objectives.Dropout, k=8)
)
OBJECTIVES.register(
    "drop-k-resampled",
    about="drop-k plus the noise that averaging removes, from fresh masks (Sec. 3.1)",
)(partial(objectives.Dropout, k=8, noise="resampled"))
OBJECTIVES.register(
    "drop-k-analytic",
    about="drop-k plus the noise that averaging removes, as ξ_approx (Algorithm 4)",
)(partial(objectives.Dropout, k=8, noise="analytic"))
OBJECTIVES.register("analytic", about="R_approx and ξ_approx in place of dropout (Algorithm 2)")(
    objectives.Analytic
)
OBJECTIVES.register("explicit", about="R_approx alone in place of dropout")(
    partial(objectives.Analytic, implicit=False)
)
OBJECTIVES.register("implicit", about="ξ_approx alone in place of dropout")(
    partial(objectives.Analytic, explicit=None)
)
OBJECTIVES.register(
    "r-drop",
    about="Dropout with two masks, plus the distance between their predictions (Liang et al. 2021)",
)(objectives.RDrop)
OBJECTIVES.register(
    "jacobian", about="½·weight·‖∂F/∂h‖² at one activation h, without dropout (Hoffman et al. 2019)"
)(objectives.Jacobian)
OBJECTIVES.register(
    "sam", about="Sharpness-aware minimization, on top of dropout (Foret et al. 2021)"
)(objectives.SAM)
OBJECTIVES.register(
    "weight-noise",
    about="Noise on the weights in both directions, without dropout (Zhang et al. 2024)",
)(objectives.WeightNoise)
OBJECTIVES.register(
    "early-dropout", about="Dropout for the first `until` steps, and none after (Liu et al. 2023)"
)(objectives.EarlyDropout)

_SUPPLIED = {"vocab_size", "generator", "loss", "batch_dim"}
"""Arguments that the trainer passes itself. They are not options."""

_TYPES: dict[str, Any] = {
    "engine": str,
    "strength": float,
    "sites": str | list[str] | dict[str, float] | None,
}
"""The types that a config accepts for options with Python types that JSON can't express."""

_SHOULD = "Input should be "
_LONGEST = 60  # characters of a value in an error message


class Checked(BaseModel):
    """Settings that are checked: numbers are finite, are not booleans, and fit into 64 bits."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

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
    """All types that an annotation mentions."""
    if isinstance(annotation, str | int | float):  # a value of a Literal
        return set()
    return {annotation}.union(*map(_types_in, get_args(annotation)))


class Component(BaseModel):
    """The name of a component in a registry, and all its options, checked."""

    model_config = ConfigDict(extra="allow", frozen=True)
    registry: ClassVar[Registry[str, Any]]

    name: str

    @model_validator(mode="before")
    @classmethod
    def _check_options(cls, values: Any) -> Any:
        """Check the options, and add the defaults of the others."""
        if not isinstance(values, Mapping):
            return values
        kind, name = cls.registry.kind, values.get("name", cls.model_fields["name"].default)
        if not isinstance(name, str):
            raise ConfigError(f"{kind}.name must be a string, got {_shown(name)}.")
        form = _options(cls.registry[name])
        given = {key: value for key, value in values.items() if key != "name"}
        for key in given.keys() - form.model_fields.keys():
            raise _unknown([kind, key], form.model_fields)
        try:
            checked = form.model_validate(given)
        except ValidationError as error:
            raise as_config_error(error, lambda path: form.model_fields, [kind]) from None
        return {"name": name, **checked.model_dump(mode="json")}

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})

    def build(self, **supplied: Any) -> Any:
        """Call the constructor with the options and those ``supplied`` arguments that it takes."""
        factory = self.registry[self.name]
        taken = inspect.signature(factory).parameters
        return factory(**self.options, **{key: v for key, v in supplied.items() if key in taken})


@cache
def _options(factory: Callable[..., Any]) -> type[BaseModel]:
    """The options of a constructor as a pydantic model, cached since it takes milliseconds to make."""
    target = factory.func if isinstance(factory, partial) else factory
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if name not in _SUPPLIED:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (_TYPES.get(name, hints[name]), default)
    form: type[BaseModel] = create_model("Options", __base__=Checked, **fields)
    return form


def as_config_error(
    error: ValidationError,
    known: Callable[[Sequence[str]], Iterable[str]],
    within: Sequence[str] = (),
) -> ConfigError:
    """Return the first problem of a validation as one sentence: the setting, its value, its range.

    Args:
        error: pydantic's error.
        known: returns the names in a section, given its path.
        within: the path of the section that was validated.
    """
    first = error.errors(include_url=False, include_context=False)[0]
    path = [*within, *map(str, first["loc"])]
    name, text = ".".join(path), first["msg"].removeprefix("Value error, ")
    text = text.partition(", unable to parse")[0]  # the rest repeats the same in other words
    if first["type"] == "extra_forbidden":
        return _unknown(path, known(path[:-1]))
    if first["type"] == "missing":
        return ConfigError(f"{name} must be given.")
    if first["type"] == "value_error":
        return ConfigError(text)
    expected = "a smaller number" if "_size" in first["type"] else text.removeprefix(_SHOULD)
    return ConfigError(f"{name} must be {expected}, got {_shown(first['input'])}.")


def _shown(value: object) -> str:
    """A value in an error message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number with thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _unknown(path: Sequence[str], known: Iterable[str]) -> ConfigError:
    names = [".".join([*path[:-1], name]) for name in known]
    return ConfigError(str(UnknownNameError("setting", ".".join(path), names)))
