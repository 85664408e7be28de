"""Every setting of a training run, checked before anything is done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from undrop.errors import ConfigError
from undrop.lab.train.components import MODELS, OBJECTIVES
from undrop.lab.train.validation import sentence

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "TrainConfig",
]


_Count = Annotated[int, Field(ge=1)]
_Positive = Annotated[float, Field(gt=0.0)]
_NonNegative = Annotated[float, Field(ge=0.0)]
_Share = Annotated[float, Field(gt=0.0, le=1.0)]
_Below1 = Annotated[float, Field(ge=0.0, lt=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Component(BaseModel):
    """A name from a table, and the options of what it names."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """All but the name."""
        return dict(self.model_extra or {})


class ModelConfig(_Component):
    """A language model of :mod:`undrop.nn` and the arguments of its constructor."""

    name: str = "awd-lstm"

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        return MODELS.complete(values, cls.model_fields["name"].default)


class ObjectiveConfig(_Component):
    """An objective of :mod:`undrop.objectives` and the arguments of its constructor."""

    name: str = "dropout"

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        return OBJECTIVES.complete(values, cls.model_fields["name"].default)


class DataConfig(_Section):
    """Which text, how much of it, and how it is cut into batches."""

    name: str = "pydocs"  # a corpus, or a folder with train, valid and test text files
    dir: str | None = None  # where to read it from instead of downloading it
    fraction: _Share = 1.0  # the part of the training split that is used
    limit_tokens: _Count | None = None  # the number of its tokens that is used
    max_vocab: _Count | None = None  # rarer words are <unk>
    batch_size: _Count = 20  # streams over all processes
    eval_batch_size: _Count = 10
    eval_tokens: _Count | None = None  # judge by so many tokens of each split; unset is all
    length: _Count = 70  # steps of back-propagation through time
    variable_length: bool = False  # draw it anew for each batch, and scale the step to it


class OptimizerConfig(_Section):
    """How a gradient becomes a step."""

    name: Literal["sgd", "asgd", "adam", "adamw"] = "sgd"
    lr: _Positive = 30.0
    momentum: _Below1 = 0.0  # of sgd and asgd
    betas: tuple[_Below1, _Below1] = (0.9, 0.999)  # of adam and adamw
    eps: _Positive = 1e-8  # of adam and adamw
    weight_decay: _NonNegative = 0.0
    clip: _Positive | None = None  # the norm that gradients are scaled down to
    patience: _Count = 5  # of asgd: epochs without a new best before averaging begins


class ScheduleConfig(_Section):
    """How the learning rate changes."""

    name: Literal["constant", "step", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0  # steps of linear rise at the start
    milestones: tuple[_NonNegative, ...] = ()  # of step: epochs after which it falls
    factor: _Share = 0.1  # of step: what it is multiplied with there
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = (
        0.0  # of cosine: the part that is left at the end
    )


class TrainConfig(_Section):
    """How long, on what, and what is written down on the way."""

    epochs: _Count = 10
    max_steps: _Count | None = None  # stop here even within an epoch
    patience: _Count | None = None  # stop after so many epochs without a new best
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    device: Literal["auto", "cpu", "cuda", "mps"] = "cpu"
    precision: Literal["float32", "bfloat16", "float64"] = "float32"  # bfloat16 is autocast
    threads: _Count | None = None  # of torch; unset leaves them as they are
    log_every: _Count = 50  # steps between lines of metrics
    checkpoint_every: _Count = 500  # steps between checkpoints; epochs' ends have one too
    test: Literal["epoch", "end"] = "epoch"  # "end": once, with the weights of the best epoch
    train_perplexity: bool = False  # each epoch: the training split's, without noise
    tensorboard: bool = False


class Config(_Section):
    """One training run. Equal configs give equal bits on the same machine."""

    preset: str | None = None  # where the settings came from
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Config:
        """Check a nested mapping.

        Raises:
            ConfigError: naming the first setting that is unknown or outside its range.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"a config must be a table of sections, got {values!r}.")
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise sentence(error, _fields) from None

    def as_dict(self) -> dict[str, Any]:
        """The whole config as plain values; ``Config.parse`` takes it back."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """A hash of every setting that bears on the result."""
        values = self.as_dict()
        del values["preset"], values["data"]["dir"]
        for unused in ("log_every", "checkpoint_every", "tensorboard"):
            del values["train"][unused]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _fields(path: Sequence[str]) -> list[str]:
    """The settings of a section."""
    section: Any = Config
    for part in path:
        section = section.model_fields[part].annotation
    return list(section.model_fields)
