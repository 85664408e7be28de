"""Read the experiments, settings and methods from the TOML files in ``tables/``."""

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
"""The scales, and what to expect of an experiment at each."""

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

_DEFAULT_MEASURE = "best_valid_ppl"
"""The measure of an experiment, a claim or a table of the paper that names none."""


@dataclass(frozen=True)
class Method:
    """One way to train."""

    name: str  # in methods.toml
    overrides: Mapping[str, Any]  # of the setting's config
    label: str  # in figures and tables
    cost: float  # the estimated time of a step, in steps of plain dropout
    tune: Sequence[Mapping[str, Any]] = ()  # what each variant to try overrides, too
    search: bool = False
    """Whether every seed tries all variants and uses its own best one.

    Otherwise the first seed tries them, and the other seeds use its best one. In a setting with a time
    limit, the variants of a search share the time of one run.
    """

    def variants(self) -> list[dict[str, Any]]:
        """Return the overrides of every variant; there is one variant unless the method is tuned."""
        from undrop.lab.train import merge

        return [merge(self.overrides, further) for further in self.tune or ({},)]


_METHOD_KEYS = {field.name for field in fields(Method)} - {"name", "overrides"}


@dataclass(frozen=True)
class Setting:
    """A model, a corpus and a training schedule, at one scale."""

    name: str  # in settings.toml
    scale: str
    seconds: float  # the estimated time of a run of plain dropout
    config: Mapping[str, Any]  # the sections of a training config
    probe: str | None = None  # the name of a measurement on the trained model
    time_limit: float | None = None  # in runs of plain dropout; None: the config sets the epochs
    base: str = ""  # the last setting in its chain of `extends`; both have the same step costs

    def epochs(self, method: Method) -> int:
        """Return the number of epochs of a method's run: with a time limit, as many as fit."""
        epochs: int = self.config["train"]["epochs"]
        if self.time_limit is None:
            return epochs
        runs = len(method.tune) if method.search else 1
        return max(1, int(epochs * self.time_limit / (self.step_cost(method) * runs) + 1e-9))

    def step_cost(self, method: Method) -> float:
        """Return the time of a method's step, in steps of plain dropout: measured or else estimated."""
        measured = _read_toml("step_costs.toml").get(self.scale, {}).get(self.base, {})
        return float(measured.get(method.name, method.cost))


@dataclass(frozen=True)
class Claim:
    """A sentence that holds if a ratio of measures lies in an interval.

    The ratio is the product of a measure over the cells of the numerator, divided by its product over
    the cells of the denominator. A cell is ``setting:method``.
    """

    sentence: str
    numerator: Sequence[str]
    denominator: Sequence[str]
    measure: str = _DEFAULT_MEASURE
    above: float = 0.0
    below: float = float("inf")
    reasons: Mapping[str, str] = field(default_factory=dict)  # scale: why it may not hold there


@dataclass(frozen=True)
class Experiment:
    """A comparison of methods on settings, and the claims about it."""

    name: str
    title: str
    paper: str  # its place in the paper, or 'ours'
    about: str  # a paragraph of the report
    settings: Sequence[str]  # names in settings.toml
    methods: Sequence[str]  # names in methods.toml
    figure: str  # a name in FIGURE_KINDS
    claims: Sequence[Claim]
    measure: str = _DEFAULT_MEASURE  # of the table, and of the figure if it shows points
    extra_cells: Sequence[str] = ()  # each setting:method

    @property
    def cells(self) -> list[str]:
        """Every method on every setting, then the extra cells, as ``setting:method``."""
        return [f"{s}:{m}" for s in self.settings for m in self.methods] + list(self.extra_cells)


@dataclass(frozen=True)
class PaperNumber:
    """A number that the paper reports."""

    value: float
    source: str  # its place in the paper
    measure: str


@cache
def _read_toml(*path: str) -> dict[str, Any]:
    file = resources.files("undrop.lab.reproduce").joinpath("tables", *path)
    return tomllib.loads(file.read_text(encoding="utf-8"))


def method(name: str) -> Method:
    """Return the method with that name."""
    table = _read_toml("methods.toml")
    if name not in table:
        raise UnknownNameError("method", name, table)
    values = {key: value for key, value in table[name].items() if key in _METHOD_KEYS}
    overrides = {key: value for key, value in table[name].items() if key not in _METHOD_KEYS}
    return Method(name, overrides=overrides, **values)


def setting(name: str, scale: str) -> Setting:
    """Return the setting with that name at a scale, merged with what it extends."""
    from undrop.lab.train import merge
    from undrop.lab.train.config import preset

    table = _read_toml("settings.toml")
    if name not in table:
        raise UnknownNameError("setting", name, table)
    if scale not in SCALES:
        raise UnknownNameError("scale", scale, SCALES)
    if scale not in table[name]:
        available = ", ".join(table[name])
        raise OptionError(
            f"the setting {name} has no scale {scale!r}; available scales: {available}."
        )
    values = dict(table[name][scale])
    extended = setting(values.pop("extends"), scale) if "extends" in values else None
    defaults: Mapping[str, Any] = extended.config if extended else {}
    if "preset" in values:
        defaults = preset(values.pop("preset"))
    return Setting(
        name,
        scale,
        seconds=values.pop("seconds", extended and extended.seconds),
        probe=values.pop("probe", None),
        time_limit=values.pop("time_limit", None),
        base=extended.base if extended else name,
        config=merge(defaults, values),
    )


@cache
def experiment(name: str) -> Experiment:
    """Return the experiment with that name.

    Raises:
        UnknownNameError: if there is no such experiment.
    """
    if name not in EXPERIMENTS:
        raise UnknownNameError("experiment", name, EXPERIMENTS)
    values = _read_toml("experiments", f"{name}.toml")
    claims = [_claim(claim, values["settings"][0]) for claim in values["claims"]]
    return Experiment(name, **{**values, "claims": claims})


def experiments_at(scale: str) -> list[str]:
    """Return the names of the experiments whose settings all exist at a scale."""
    available = {name for name, scales in _read_toml("settings.toml").items() if scale in scales}
    return [
        name
        for name in EXPERIMENTS
        if {cell.partition(":")[0] for cell in experiment(name).cells} <= available
    ]


def _claim(values: Mapping[str, Any], default_setting: str) -> Claim:
    """Return the claim that a TOML table describes.

    The table may name a cell by its method alone; its setting is then ``default_setting``.
    """
    if not {"above", "below", "within"} & values.keys():
        raise OptionError(f"the claim {values['sentence']!r} has no above, below or within.")
    values = dict(values)
    if (within := values.pop("within", None)) is not None:
        values |= {"above": 1.0 / (1.0 + within), "below": 1.0 + within}
    for side in ("numerator", "denominator"):
        values[side] = [
            cell if ":" in cell else f"{default_setting}:{cell}" for cell in values[side]
        ]
    return Claim(**values)


def paper_number(experiment: str, cell: str) -> PaperNumber | None:
    """Return the paper's number for a cell of an experiment; None if the paper has none."""
    setting, _, method = cell.partition(":")
    for table in _read_toml("paper.toml")["tables"]:
        matches = experiment in table["experiments"] and setting == table["setting"]
        if matches and method in table["values"]:
            measure = table.get("measure", _DEFAULT_MEASURE)
            return PaperNumber(table["values"][method], table["source"], measure)
    return None
