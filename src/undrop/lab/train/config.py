"""The settings of a training run: presets and overrides, checked before the run starts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError, field_validator, model_validator

from undrop.errors import ConfigError, RunError, UnknownNameError
from undrop.lab import corpora
from undrop.lab.corpora import Corpus
from undrop.lab.models import MODELS, LanguageModel
from undrop.lab.train.callbacks import LOGGERS
from undrop.lab.train.components import Component, Settings, as_config_error
from undrop.lab.train.environment import is_out_of_memory
from undrop.objectives import OBJECTIVES, Objective

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0.0)]
_NonNegative = Annotated[float, Field(ge=0.0)]
_Share = Annotated[float, Field(gt=0.0, le=1.0)]
_Below1 = Annotated[float, Field(ge=0.0, lt=1.0)]


class ModelConfig(Component):
    """A language model of :mod:`undrop.lab.models` and the arguments of its constructor."""

    registry = MODELS
    required = "vocab_size"
    name: str = "awd-lstm"


class ObjectiveConfig(Component):
    """An objective of :mod:`undrop.objectives` and the arguments of its constructor."""

    registry = OBJECTIVES
    required = "loss"
    name: str = "dropout"


class DataConfig(Settings):
    """Which text to train on, how much of it, and how to cut it into batches."""

    name: str = "pydocs"  # a corpus, or a folder with train, valid and test text files
    dir: str | None = None  # read the corpus from this folder instead of downloading it
    fraction: _Share = 1.0  # the share of the training split to use
    limit_tokens: _Count | None = None  # the number of tokens of the training split to use
    max_vocab: _Count | None = None  # rarer words become <unk>
    batch_size: _Count = 20  # the number of streams, over all processes
    eval_batch_size: _Count = 10
    eval_tokens: _Count | None = None  # evaluate on this many tokens from the start of each split
    length: _Count = 70  # time steps of back-propagation through time
    variable_length: bool = False  # draw a length for each batch, and scale the learning rate by it


class OptimizerConfig(Settings):
    """The optimizer and its options."""

    name: Literal["sgd", "asgd", "adam", "adamw"] = "sgd"
    lr: _Positive = 30.0
    momentum: _Below1 = 0.0  # for sgd and asgd
    betas: tuple[_Below1, _Below1] = (0.9, 0.999)  # for adam and adamw
    eps: _Positive = 1e-8  # for adam and adamw
    weight_decay: _NonNegative = 0.0
    clip: _Positive | None = None  # the maximum norm of the gradient; larger ones are scaled down
    patience: _Count = 5  # for asgd: epochs without improvement before averaging starts


class ScheduleConfig(Settings):
    """How the learning rate changes during a run."""

    name: Literal["constant", "step", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0  # the number of steps in which the rate rises linearly
    milestones: tuple[_NonNegative, ...] = ()  # for step: the rate drops after these epochs
    factor: _Share = 0.1  # for step: the factor at each milestone
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0  # for cosine: the factor at the end


class TrainConfig(Settings):
    """How long to train, on which device, and what to log."""

    epochs: _Count = 10
    max_steps: _Count | None = None  # stop after this many steps, even within an epoch
    patience: _Count | None = None  # stop after this many epochs without improvement
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"
    precision: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16 is autocast
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None  # unset: torch's default
    log_every: _Count = 50  # steps between two records of the metrics
    checkpoint_every: _Count = 500  # steps between two checkpoints; each epoch also ends with one
    test: Literal["epoch", "end"] = "epoch"  # "end": only once, with the weights of the best epoch
    train_perplexity: bool = False  # evaluate the training split without noise after each epoch
    label_smoothing: _Below1 = 0.0  # of the training loss; evaluation has none
    tune: _Below1 = 0.0  # set this share of the training split aside, and tune every p on it
    loggers: tuple[str, ...] = ()  # csv, tensorboard, wandb

    @model_validator(mode="before")
    @classmethod
    def _convert_tensorboard(cls, values: Any) -> Any:
        """Convert ``tensorboard = true``, a setting of older configs."""
        if not isinstance(values, Mapping) or "tensorboard" not in values:
            return values
        rest = {key: value for key, value in values.items() if key != "tensorboard"}
        if values["tensorboard"] is True:
            rest["loggers"] = (*rest.get("loggers", ()), "tensorboard")
        return rest

    @field_validator("loggers", mode="before")
    @classmethod
    def _accept_one_name(cls, names: Any) -> Any:
        return (names,) if isinstance(names, str) else names

    @field_validator("loggers")
    @classmethod
    def _check_loggers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            LOGGERS[name]  # an unknown name is an error
        return tuple(dict.fromkeys(names))


class Config(Settings):
    """All settings of a training run. On one machine, equal configs give bitwise identical runs."""

    preset: str | None = None  # the preset that the settings are based on
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Config:
        """Check a nested mapping and return it as a config.

        Raises:
            ConfigError: if a setting is unknown or outside its range; the message names it.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"a config must be a table of sections, got {values!r}.")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise as_config_error(error, cls) from None

    def as_dict(self) -> dict[str, Any]:
        """Return the config as plain values, which ``Config.parse`` accepts."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Return a hash of every setting that affects the result."""
        values = self.as_dict()
        del values["preset"], values["data"]["dir"]
        for name in ("log_every", "checkpoint_every", "loggers"):
            del values["train"][name]
        for name in ("tune", "label_smoothing"):
            if not values["train"][name]:
                del values["train"][name]  # keep the hashes from before this setting existed
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def load_corpus(self) -> Corpus:
        """Load the corpus, downloading and encoding it if necessary."""
        data = self.data
        return corpora.load(
            data.name,
            data_dir=data.dir,
            limit_tokens=data.limit_tokens,
            fraction=data.fraction,
            max_vocab=data.max_vocab,
        )

    def build_model(self, corpus: Corpus, device: torch.device | None = None) -> LanguageModel:
        """Return the model with new weights, in the precision of the config.

        Raises:
            RunError: if the model does not fit in memory.
        """
        dtype = torch.float64 if self.train.precision == "float64" else torch.float32
        try:
            model: LanguageModel = self.model.build(vocab_size=corpus.vocabulary.size)
            return model.to(device=device, dtype=dtype)
        except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"the model {self.model.name} does not fit in memory with these settings: lower its "
                "sizes or layers."
            ) from error

    def build_objective(self, model: LanguageModel) -> Objective:
        """Return the objective, with the loss of the model."""
        loss = model.loss(label_smoothing=self.train.label_smoothing)
        objective: Objective = self.objective.build(loss=loss, batch_dim=1)
        return objective


_COMPONENTS = ("model", "objective")
"""The sections whose options depend on their ``name``."""


def presets() -> list[str]:
    """Return the names of all presets."""
    files = (file.name for file in (resources.files("undrop") / "presets").iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def preset(name: str) -> dict[str, Any]:
    """Return the settings of a preset, merged with those of the preset that it extends.

    Args:
        name: one of ``presets()``, or the path of your own file, which ends in ``.toml``.

    Raises:
        UnknownNameError: if no preset has that name, or the preset extends one that does not exist.
        ConfigError: if the file does not exist or is not valid TOML.
    """
    is_path = name.endswith(".toml")
    if not is_path and name not in presets():
        raise UnknownNameError("preset", name, presets())
    file = Path(name) if is_path else resources.files("undrop") / "presets" / f"{name}.toml"
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the preset {name} can't be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad TOML, a zero byte in the path
        raise ConfigError(f"{name} is not valid TOML: {error}.") from None
    values.pop("description", None)
    base = values.pop("extends", None)
    if base is None:
        return {**values, "preset": name}
    if not isinstance(base, str):
        raise ConfigError(f"extends in {name} must be the name of a preset, got {base!r}.")
    if base not in presets():  # only undrop's own presets, so there are no cycles
        raise UnknownNameError("preset", base, presets(), f" for {name} to extend")
    return {**merge(preset(base), values), "preset": name}


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``base``, overridden by those of ``overrides``.

    If ``overrides`` names another model or objective, the options of the previous one are dropped.
    """
    result = dict(base)
    for key, value in overrides.items():
        old = result.get(key)
        if not isinstance(value, Mapping) or not isinstance(old, Mapping):
            result[key] = value
        elif key in _COMPONENTS and value.get("name", old.get("name")) != old.get("name"):
            result[key] = dict(value)
        else:
            result[key] = {**old, **value}
    return result


def parse_override(text: str) -> dict[str, Any]:
    """Turn ``"optimizer.lr=5"`` into nested settings.

    The value is read as TOML, or as ``null``; a value that is neither is a string.

    Raises:
        ConfigError: if the text is not of the form ``section.key=value``.
    """
    path, equals, value_text = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set takes section.key=value, such as optimizer.lr=5, got {text!r}.")
    value: Any = value_text.strip()
    with contextlib.suppress(ValueError, RecursionError):  # not TOML, or thousands of digits
        value = None if value == "null" else tomllib.loads(f"value = {value}")["value"]
    return {section: {key: value}}


def configure(
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
) -> Config:
    """Return a config from a preset, settings that override it, and ``section.key=value`` overrides.

    Raises:
        ConfigError: if a setting is unknown or outside its range; the message names it.
    """
    values = preset(name) if name is not None else {}
    for layer in [settings or {}, *map(parse_override, overrides)]:
        values = merge(values, layer)
    return Config.parse(values)
