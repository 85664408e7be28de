"""The models and objectives that a config can name, with options read off their constructors.

A constructor's signature is the one place where its options are written: a config checks them
against it, so that a new model or objective is one line in a table here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from undrop import objectives
from undrop.errors import ConfigError, UnknownNameError
from undrop.lab import models
from undrop.lab.train.validation import sentence, unknown

__all__ = ["MODELS", "OBJECTIVES", "Table"]


@dataclass(frozen=True)
class Entry:
    """What a name stands for: a constructor, and the options that make it this and no other."""

    factory: Callable[..., Any]
    preset: Mapping[str, Any] = field(default_factory=dict)


class Table:
    """Constructors by name.

    Args:
        kind: what the names name, for errors.
        supplied: arguments that the trainer itself passes, and so no options.
        types: what an option may be in a config, where its constructor takes more than JSON has.
    """

    def __init__(
        self, kind: str, supplied: Collection[str], types: Mapping[str, Any] | None = None
    ) -> None:
        self.kind = kind
        self._supplied = frozenset(supplied)
        self._types = dict(types or {})
        self._entries: dict[str, Entry] = {}
        self._forms: dict[Callable[..., Any], type[BaseModel]] = {}

    def add(self, name: str, factory: Callable[..., Any], **preset: Any) -> None:
        """Give a constructor a name.

        Raises:
            ConfigError: if the name is taken.
        """
        if name in self._entries:
            raise ConfigError(f"there is a {self.kind} {name!r} already.")
        self._entries[name] = Entry(factory, preset)

    def names(self) -> list[str]:
        """All names, in the order they were given."""
        return list(self._entries)

    def build(self, name: str, options: Mapping[str, Any], **supplied: Any) -> Any:
        """Call the constructor; of ``supplied`` it gets what it takes."""
        factory = self._entry(name).factory
        taken = inspect.signature(factory).parameters
        return factory(**options, **{key: v for key, v in supplied.items() if key in taken})

    def complete(self, values: Any, default: str) -> Any:
        """The name and all options with their defaults, checked against the signature."""
        if not isinstance(values, Mapping):
            return values
        name = values.get("name", default)
        if not isinstance(name, str):
            raise ConfigError(f"{self.kind}.name must be a string, got {name!r}.")
        entry = self._entry(name)
        given = {key: value for key, value in values.items() if key != "name"}
        model = self._options(entry.factory)
        for key in given.keys() - model.model_fields.keys():
            raise unknown([self.kind, key], model.model_fields)
        try:
            checked = model.model_validate({**entry.preset, **given})
        except ValidationError as error:
            raise sentence(error, lambda path: model.model_fields, [self.kind]) from None
        return {"name": name, **checked.model_dump(mode="json")}

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise UnknownNameError(self.kind, name, self._entries)
        return self._entries[name]

    def _options(self, factory: Callable[..., Any]) -> type[BaseModel]:
        """A checked form of a constructor's keyword arguments; it takes milliseconds to make."""
        if factory not in self._forms:
            self._forms[factory] = self._form(factory)
        return self._forms[factory]

    def _form(self, factory: Callable[..., Any]) -> type[BaseModel]:
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(factory).parameters.items():
            if name not in self._supplied:
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[name] = (self._types.get(name, hints[name]), default)
        config = ConfigDict(frozen=True, allow_inf_nan=False)
        return create_model("Options", __config__=config, **fields)


MODELS = Table("model", supplied=["vocab_size"])
"""The language models."""

for _name, _model in {
    "awd-lstm": models.AWDLSTM,
    "qrnn": models.QRNN,
    "transformer-xl": models.TransformerXL,
    "gpt": models.GPT,
}.items():
    MODELS.add(_name, _model)

OBJECTIVES = Table(
    "objective",
    supplied=["generator", "loss", "batch_dim"],
    types={"strength": float, "sites": str | list[str] | dict[str, float] | None},
)
"""The objectives; the paper's variants are the same classes with other options."""

OBJECTIVES.add("none", objectives.NoRegularization)
OBJECTIVES.add("l2", objectives.L2, weight=1e-5)
OBJECTIVES.add("dropout", objectives.Dropout)
OBJECTIVES.add("drop-k", objectives.Dropout, k=8)
OBJECTIVES.add("drop-k-resampled", objectives.Dropout, k=8, noise="resampled")
OBJECTIVES.add("drop-k-analytic", objectives.Dropout, k=8, noise="analytic")
OBJECTIVES.add("analytic", objectives.Analytic)
OBJECTIVES.add("explicit", objectives.Analytic, implicit=False)
OBJECTIVES.add("implicit", objectives.Analytic, explicit=None)
OBJECTIVES.add("r-drop", objectives.RDrop)
OBJECTIVES.add("jacobian", objectives.Jacobian)
OBJECTIVES.add("sam", objectives.SAM)
OBJECTIVES.add("early-dropout", objectives.EarlyDropout)
