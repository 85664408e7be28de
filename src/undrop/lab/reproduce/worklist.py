"""The runs that experiments need. Experiments share runs, and tuning runs come first."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from undrop.lab.reproduce import tables
from undrop.lab.reproduce.records import Record, Records, key_of
from undrop.lab.train import Config, merge


@dataclass(frozen=True)
class PlannedRun:
    """One training run, perhaps with a measurement at its end."""

    config: Config  # every setting, including the seed
    probe: str | None  # the name of a measurement on the trained model
    setting: str  # the name of its setting, for the time estimate
    cost: float  # the estimated time of the run, in dropout runs of the setting

    @cached_property
    def key(self) -> str:
        """The hash of everything that affects the result."""
        return key_of(self.config, self.probe)

    @property
    def title(self) -> str:
        """A short description, for progress lines."""
        options = ", ".join(
            f"{name}={value}"
            for name, value in self.config.objective.options.items()
            if name in ("k", "noise", "strength", "weight") and value is not None
        )
        shown = f"{self.config.objective.name}({options})"
        return f"{self.setting} {shown} seed {self.config.train.seed}"


@dataclass(frozen=True)
class Cell:
    """A method on a setting, with all its seeds and tuning variants."""

    setting: tables.Setting
    method: tables.Method
    seeds: Sequence[int]
    overlay: Mapping[str, Any]
    _runs: dict[tuple[int, int], PlannedRun] = field(default_factory=dict)

    def run(self, variant: int, seed: int) -> PlannedRun:
        """Return the run of a variant with a seed."""
        if (variant, seed) not in self._runs:
            setting, method = self.setting, self.method
            values = merge(merge(setting.settings, method.variants()[variant]), self.overlay)
            values = merge(values, {"train": {"seed": seed, "epochs": setting.epochs(method)}})
            tries = len(self.variants) if method.search else 1
            cost = method.cost if setting.time is None else setting.time / tries
            run = PlannedRun(Config.parse(values), setting.probe, setting.name, cost)
            self._runs[variant, seed] = run
        return self._runs[variant, seed]

    @property
    def variants(self) -> range:
        """The indices of the method's variants."""
        return range(len(self.method.variants()))

    def choice(self, records: Records, seed: int | None = None) -> int | None:
        """Return the index of the variant with the best validation perplexity; None until all are tried.

        Variants are compared on the first seed, or on each seed if the method searches.
        """
        if len(self.variants) == 1:
            return 0
        seed = self.seeds[0] if seed is None or not self.method.search else seed
        tried = [records.get(self.run(v, seed).key) for v in self.variants]
        found = [record.best_valid_ppl for record in tried if record is not None]
        return found.index(min(found)) if len(found) == len(tried) else None

    def chosen_records(self, records: Records) -> dict[int, Record]:
        """Return the records of the chosen variant, by seed."""
        choices = {seed: self.choice(records, seed) for seed in self.seeds}
        found = {
            seed: records.get(self.run(choice, seed).key)
            for seed, choice in choices.items()
            if choice is not None
        }
        return {seed: record for seed, record in found.items() if record is not None}

    def needed(self, records: Records) -> list[PlannedRun]:
        """Return the tuning runs on the first seed, then the chosen variant on the other seeds."""
        if self.method.search:
            return [self.run(variant, seed) for seed in self.seeds for variant in self.variants]
        tuning = [self.run(variant, self.seeds[0]) for variant in self.variants]
        choice = self.choice(records)
        later = [] if choice is None else [self.run(choice, seed) for seed in self.seeds[1:]]
        return tuning + later

    def waiting(self, records: Records) -> int:
        """Return the number of runs that wait for the result of the tuning."""
        waits = not self.method.search and self.choice(records) is None
        return len(self.seeds) - 1 if waits else 0


class Worklist:
    """All runs of some experiments at a scale, each listed once.

    Args:
        names: the names of the experiments.
        scale: one of :data:`~undrop.lab.reproduce.tables.SCALES`.
        seeds: the number of seeds, which are 1, 2, …
        data_dir: the folder to read corpora from instead of downloading them.
    """

    def __init__(
        self, names: Sequence[str], scale: str, seeds: int, data_dir: str | None = None
    ) -> None:
        self.scale = scale
        self.experiments = [tables.experiment(name) for name in names]
        overlay = {} if data_dir is None else {"data": {"dir": data_dir}}
        self.cells: dict[str, Cell] = {}
        for name in dict.fromkeys(cell for e in self.experiments for cell in e.cells):
            setting, _, method = name.partition(":")
            made = tables.setting(setting, scale), tables.method(method)
            self.cells[name] = Cell(*made, range(1, seeds + 1), overlay)

    def needed(self, records: Records) -> list[PlannedRun]:
        """Return every run that is known so far, each once, the cheapest first."""
        runs: dict[str, PlannedRun] = {}
        for cell in self.cells.values():
            for run in cell.needed(records):
                runs.setdefault(run.key, run)
        seconds = self.estimates(runs.values(), records)
        return sorted(runs.values(), key=lambda run: seconds[run.key])

    def missing(self, records: Records) -> list[PlannedRun]:
        """Return the needed runs without a record."""
        return [run for run in self.needed(records) if records.get(run.key) is None]

    def waiting(self, records: Records) -> list[tuple[Cell, int]]:
        """Return the cells whose tuning is not done, with the number of runs that wait for it."""
        counted = ((cell, cell.waiting(records)) for cell in self.cells.values())
        return [(cell, count) for cell, count in counted if count]

    def estimates(self, runs: Iterable[PlannedRun], records: Records) -> dict[str, float]:
        """Return seconds on one core by key, from the setting's records or else from settings.toml."""
        names = {cell.setting.name for cell in self.cells.values()}
        paces = {name: self._pace(name, records) for name in names}
        return {run.key: paces[run.setting] * run.cost for run in runs}

    def remaining(self, records: Records) -> float:
        """Return the estimated seconds of everything that is missing, on one core."""
        missing = self.missing(records)
        named = sum(self.estimates(missing, records).values())
        later = sum(
            self._pace(cell.setting.name, records) * cell.method.cost * count
            for cell, count in self.waiting(records)
        )
        return named + later

    def _pace(self, name: str, records: Records) -> float:
        """Seconds of a dropout run of a setting."""
        cells = [cell for cell in self.cells.values() if cell.setting.name == name]
        paces = []
        for cell in cells:
            for run in (cell.run(v, seed) for v in cell.variants for seed in cell.seeds):
                if (record := records.get(run.key)) is not None:
                    paces.append(record.seconds / run.cost)
        return statistics.median(paces) if paces else cells[0].setting.seconds
