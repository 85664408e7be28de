"""The experiments as data: read the TOML files in ``tables/`` and check them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from typing import Any

from undrop.errors import OptionError, UnknownNameError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCALES = {
    "smoke": "seconds, for tests",
    "small": "hours on a laptop",
    "medium": "minutes per run, a day on a laptop",
    "paper": "the paper's own settings, on GPUs",
}
"""The scales, and how long they take."""

EXPERIMENTS = (
    "averaging-noise",
    "noise-put-back",
    "explicit-only",
    "implicit-only",
    "replace-dropout",
    "ptb-table",
    "loss-hessian",
    "strength",
    "rivals",
    "equal-time",
    "taylor",
    "wt2-table",
    "dataset-size",
    "data-curve",
    "qrnn",
    "ptb-whole",
)
"""All experiments, in the order of the report."""
_MEASURE = "best_valid_ppl"  # the default of experiments, claims and the paper's tables


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str  # in methods.toml
    settings: Mapping[str, Any]  # what it changes in the config of a setting
    label: str  # in figures and tables
    cost: float  # of a step, in steps of plain dropout: an estimate
    tune: Sequence[Mapping[str, Any]] = ()  # variants to try; the best on the first seed is used
    search: bool = False
    """Whether every seed tries all variants. With a time limit (:attr:`Setting.time`) the variants share
    the time of one run."""

    def variants(self) -> list[dict[str, Any]]:
        """Return the settings of every variant; there is one unless the method is tuned."""
        from undrop.lab.train import merge

        return [merge(self.settings, values) for values in self.tune or ({},)]


_METHOD_KEYS = {field.name for field in fields(Method)} - {"name", "settings"}


@dataclass(frozen=True)
class Setting:
    """A model, a corpus and a way of training, at one scale."""

    name: str  # in settings.toml
    scale: str
    seconds: float  # the estimated time of a dropout run
    settings: Mapping[str, Any]  # sections of a training config
    probe: str | None = None  # the name of a measurement on the trained model
    time: float | None = None  # the time limit, in dropout runs; None limits epochs instead
    base: str = ""  # the setting whose steps cost the same, by its name in step_costs.toml

    def epochs(self, method: Method) -> int:
        """Return the number of epochs of a method's run; with a time limit, as many as fit."""
        epochs: int = self.settings["train"]["epochs"]
        if self.time is None:
            return epochs
        tries = len(method.tune) if method.search else 1
        return max(1, int(epochs * self.time / (self.step_cost(method) * tries) + 1e-9))

    def step_cost(self, method: Method) -> float:
        """Return the time of a method's step in steps of plain dropout: measured, or an estimate."""
        measured = _table("step_costs.toml").get(self.scale, {}).get(self.base, {})
        return float(measured.get(method.name, method.cost))


@dataclass(frozen=True)
class Claim:
    """A sentence that holds if a ratio of measures lies in an interval.

    The ratio is the product of a measure over the cells ``over``, divided by the product over the cells
    ``under``. A cell is ``setting:method``.
    """

    sentence: str
    over: Sequence[str]
    under: Sequence[str]
    measure: str = _MEASURE
    above: float = 0.0
    below: float = float("inf")
    reasons: Mapping[str, str] = field(default_factory=dict)  # why it may not hold, by scale


@dataclass(frozen=True)
class Experiment:
    """Methods compared on settings, and the claims about them."""

    name: str
    title: str
    paper: str  # where it is in the paper, or 'ours'
    about: str
    settings: Sequence[str]
    methods: Sequence[str]
    figure: str
    claims: Sequence[Claim]
    measure: str = _MEASURE
    more: Sequence[str] = ()  # further cells, each setting:method

    @property
    def cells(self) -> list[str]:
        """Every method on every setting, and the further cells, as ``setting:method``."""
        return [f"{s}:{m}" for s in self.settings for m in self.methods] + list(self.more)


@dataclass(frozen=True)
class PaperNumber:
    """A number in the paper, and where it is."""

    value: float
    where: str
    measure: str


@cache
def _table(*path: str) -> dict[str, Any]:
    file = resources.files("undrop.lab.reproduce").joinpath("tables", *path)
    return tomllib.loads(file.read_text(encoding="utf-8"))


def method(name: str) -> Method:
    """Return the method of that name."""
    table = _table("methods.toml")
    if name not in table:
        raise UnknownNameError("method", name, table)
    own = {key: value for key, value in table[name].items() if key in _METHOD_KEYS}
    settings = {key: value for key, value in table[name].items() if key not in _METHOD_KEYS}
    return Method(name, settings=settings, **own)


def setting(name: str, scale: str) -> Setting:
    """Return the setting of that name at a scale, on top of the preset or setting it extends."""
    from undrop.lab.train import merge
    from undrop.lab.train.config import preset

    table = _table("settings.toml")
    if name not in table:
        raise UnknownNameError("setting", name, table)
    if scale not in SCALES:
        raise UnknownNameError("scale", scale, SCALES)
    if scale not in table[name]:
        known = ", ".join(table[name])
        raise OptionError(f"the setting {name} has no scale {scale!r}; available scales: {known}.")
    values = dict(table[name][scale])
    base = setting(values.pop("extends"), scale) if "extends" in values else None
    below = preset(values.pop("preset")) if "preset" in values else base.settings if base else {}
    return Setting(
        name,
        scale,
        seconds=values.pop("seconds", base and base.seconds),
        probe=values.pop("probe", None),
        time=values.pop("time", None),
        base=base.base if base else name,
        settings=merge(below, values),
    )


@cache
def experiment(name: str) -> Experiment:
    """Return the experiment of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    if name not in EXPERIMENTS:
        raise UnknownNameError("experiment", name, EXPERIMENTS)
    values = _table("experiments", f"{name}.toml")
    claims = [_claim(claim, values["settings"][0]) for claim in values["claims"]]
    return Experiment(name, **{**values, "claims": claims})


def experiments_at(scale: str) -> list[str]:
    """Return the names of the experiments that have all their settings at a scale."""
    settings = {name for name, scales in _table("settings.toml").items() if scale in scales}
    used = {
        name: {cell.partition(":")[0] for cell in experiment(name).cells} for name in EXPERIMENTS
    }
    return [name for name in EXPERIMENTS if used[name] <= settings]


def _claim(values: Mapping[str, Any], default: str) -> Claim:
    """Return the claim in a table of a file; a method without a setting is on the ``default`` one."""
    if not {"above", "below", "within"} & values.keys():
        raise OptionError(f"the claim {values['sentence']!r} has no above, below or within.")
    values = dict(values)
    if (within := values.pop("within", None)) is not None:
        values |= {"above": 1.0 / (1.0 + within), "below": 1.0 + within}
    for side in ("over", "under"):
        values[side] = [name if ":" in name else f"{default}:{name}" for name in values[side]]
    return Claim(**values)


def paper_number(experiment: str, cell: str) -> PaperNumber | None:
    """Return the paper's number for a cell of an experiment, or None."""
    setting, _, method = cell.partition(":")
    for table in _table("paper.toml")["tables"]:
        here = experiment in table["experiments"] and setting == table["setting"]
        if here and method in table["values"]:
            measure = table.get("measure", _MEASURE)
            return PaperNumber(table["values"][method], table["where"], measure)
    return None
