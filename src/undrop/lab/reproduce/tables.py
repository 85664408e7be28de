"""The experiments as data: read the TOML files in ``tables/`` and check them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
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
"""All experiments; the paper's come first, in its order."""


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str  # in methods.toml
    label: str  # in figures and tables
    cost: float  # of a step, in plain steps
    settings: Mapping[str, Any]  # that it changes
    tune: tuple[Mapping[str, Any], ...] = ()  # variants to try; the best on the first seed is used
    search: bool = False
    """Whether every seed tries all variants. With a limit of time (:attr:`Setting.time`) the variants
    share the time of one run."""

    def variants(self) -> list[dict[str, Any]]:
        """Return the settings of every variant; there is one unless the method is tuned."""
        from undrop.lab.train import merge

        return [merge(self.settings, values) for values in self.tune or ({},)]


@dataclass(frozen=True)
class Setting:
    """A model, a corpus and a way of training, at one scale."""

    name: str  # in settings.toml
    scale: str
    seconds: float  # the estimated time of a plain run
    settings: Mapping[str, Any]  # sections of a training config
    probe: str | None = None  # the name of a measurement on the trained model
    time: float | None = None  # the limit of a run in runs of plain dropout; None counts epochs
    base: str = ""  # the setting with the same steps, whose costs are in step_costs.toml

    def epochs(self, method: Method) -> int:
        """Return the number of epochs of a method's run, as many as fit into the time if it is set."""
        epochs: int = self.settings["train"]["epochs"]
        if self.time is None:
            return epochs
        tries = len(method.tune) if method.search else 1
        fit = epochs * self.time / (step_cost(self, method) * tries)
        return max(1, int(fit + 1e-9))


@dataclass(frozen=True)
class Claim:
    """A sentence, and the interval in which a ratio of measures must lie for it to hold.

    The ratio is the product of a measure over the cells ``over``, divided by that over the cells
    ``under``. A cell is ``setting:method``.
    """

    sentence: str
    measure: str
    over: tuple[str, ...]
    under: tuple[str, ...]
    above: float
    below: float
    reasons: Mapping[str, str] = field(default_factory=dict)  # why it may not hold, by scale


@dataclass(frozen=True)
class Experiment:
    """Methods compared on settings, and the claims about them."""

    name: str
    title: str
    paper: str
    about: str
    settings: tuple[str, ...]
    methods: tuple[str, ...]
    figure: str
    measure: str
    claims: tuple[Claim, ...]
    more: tuple[str, ...] = ()  # further cells, each setting:method

    @property
    def cells(self) -> list[tuple[str, str]]:
        """All pairs of a setting and a method, and the further cells."""
        pairs = [(setting, method) for setting in self.settings for method in self.methods]
        further = (cell.partition(":") for cell in self.more)
        return pairs + [(setting, method) for setting, _, method in further]

    def at(self, scale: str) -> bool:
        """Whether all its settings exist at a scale."""
        return all(scale in _table("settings.toml")[setting] for setting, _ in self.cells)


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
    values = dict(table[name])
    return Method(
        name,
        label=values.pop("label"),
        cost=values.pop("cost"),
        tune=tuple(values.pop("tune", ())),
        search=values.pop("search", False),
        settings=values,
    )


def step_cost(setting: Setting, method: Method) -> float:
    """Return the time of a method's step in steps of plain dropout.

    It is the measured time on the setting, or else the estimate in ``methods.toml``.
    """
    measured = _table("step_costs.toml").get(setting.scale, {}).get(setting.base, {})
    return float(measured.get(method.name, method.cost))


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
        there = ", ".join(table[name])
        raise OptionError(f"the setting {name} has no scale {scale!r}: there are {there}.")
    values = dict(table[name][scale])
    base = values.pop("extends", None)
    below = setting(base, scale) if base is not None else None
    named = values.pop("preset", None)
    settings = below.settings if below is not None else preset(named) if named is not None else {}
    seconds = values.pop("seconds", None if below is None else below.seconds)
    return Setting(
        name,
        scale,
        float(seconds),
        probe=values.pop("probe", None),
        time=values.pop("time", None),
        base=name if below is None else below.base,
        settings=merge(settings, values),
    )


@cache
def experiment(name: str) -> Experiment:
    """Return the experiment of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    if name not in EXPERIMENTS:
        raise UnknownNameError("experiment", name, EXPERIMENTS)
    values = dict(_table("experiments", f"{name}.toml"))
    settings = tuple(values.pop("settings"))
    return Experiment(
        name,
        settings=settings,
        methods=tuple(values.pop("methods")),
        claims=tuple(_claim(claim, settings[0]) for claim in values.pop("claims")),
        measure=values.pop("measure", "best_valid_ppl"),
        more=tuple(values.pop("more", ())),
        **values,
    )


def experiments_at(scale: str) -> list[str]:
    """Return the names of the experiments that exist at a scale."""
    return [name for name in EXPERIMENTS if experiment(name).at(scale)]


def _claim(values: Mapping[str, Any], default: str) -> Claim:
    if not {"above", "below", "within"} & values.keys():
        raise OptionError(f"the claim {values['sentence']!r} has no above, below or within.")
    within = values.get("within")
    above = values.get("above", 0.0) if within is None else 1.0 / (1.0 + within)
    below = values.get("below", float("inf")) if within is None else 1.0 + within
    return Claim(
        sentence=values["sentence"],
        measure=values.get("measure", "best_valid_ppl"),
        over=tuple(_cell(name, default) for name in values["over"]),
        under=tuple(_cell(name, default) for name in values["under"]),
        above=above,
        below=below,
        reasons=values.get("reasons", {}),
    )


def _cell(name: str, default: str) -> str:
    """A method's name alone means the method on the experiment's first setting."""
    return name if ":" in name else f"{default}:{name}"


def paper_number(experiment: str, setting: str, method: str) -> PaperNumber | None:
    """Return the paper's number for a method on a setting, or None."""
    for table in _table("paper.toml")["tables"]:
        here = experiment in table["experiments"] and setting == table["setting"]
        if here and method in table["values"]:
            measure = table.get("measure", "best_valid_ppl")
            return PaperNumber(table["values"][method], table["where"], measure)
    return None
