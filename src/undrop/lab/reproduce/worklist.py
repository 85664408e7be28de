"""The runs that experiments need. Experiments share runs, and tuning runs come before the others."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from undrop.lab.reproduce import tables
from undrop.lab.reproduce.records import Record, Records, run_key
from undrop.lab.train import Config, merge


@dataclass(frozen=True)
class PlannedRun:
    """One training run, with an optional measurement on the trained model."""

    config: Config  # with the seed
    probe: str | None  # the name of a measurement on the trained model
    setting: str  # the name of its setting
    cost: float  # its estimated time, in runs of plain dropout on the same setting

    @cached_property
    def key(self) -> str:
        """What identifies the result of the run: the hash of its config, and the name of its probe."""
        return run_key(self.config, self.probe)

    @property
    def title(self) -> str:
        """A short description, for progress lines."""
        objective, shown = self.config.objective, ("k", "noise", "strength", "weight")
        options = (f"{k}={v}" for k, v in objective.options.items() if k in shown and v is not None)
        return (
            f"{self.setting} {objective.name}({', '.join(options)}) seed {self.config.train.seed}"
        )


@dataclass(frozen=True)
class Cell:
    """A method on a setting, with all its seeds and tuning variants."""

    setting: tables.Setting
    method: tables.Method
    seeds: Sequence[int]
    overrides: Mapping[str, Any]  # of the config of every run, after the method's
    _runs: dict[tuple[int, int], PlannedRun] = field(default_factory=dict)

    def run(self, variant: int, seed: int) -> PlannedRun:
        """Return the run of a variant with a seed."""
        if (variant, seed) not in self._runs:
            setting, method = self.setting, self.method
            values = merge(merge(setting.config, method.variants()[variant]), self.overrides)
            values = merge(values, {"train": {"seed": seed, "epochs": setting.epochs(method)}})
            cost = method.cost
            if setting.time_limit is not None:
                cost = setting.time_limit / (len(self.variants) if method.search else 1)
            planned = PlannedRun(Config.parse(values), setting.probe, setting.name, cost)
            self._runs[variant, seed] = planned
        return self._runs[variant, seed]

    @property
    def variants(self) -> range:
        """The indices of the method's variants."""
        return range(len(self.method.variants()))

    def best_variant(self, records: Records, seed: int | None = None) -> int | None:
        """Return the index of the variant with the best validation perplexity; None until all are tried.

        The variants are compared on ``seed`` if the method searches, and else on the first seed.
        """
        if len(self.variants) == 1:
            return 0
        seed = self.seeds[0] if seed is None or not self.method.search else seed
        trials = [records.get(self.run(variant, seed).key) for variant in self.variants]
        perplexities = [record.best_valid_ppl for record in trials if record is not None]
        if len(perplexities) < len(trials):
            return None
        return perplexities.index(min(perplexities))

    def best_records(self, records: Records) -> dict[int, Record]:
        """Return the records of the best variant, by seed."""
        best = ((seed, self.best_variant(records, seed)) for seed in self.seeds)
        found = {seed: records.get(self.run(v, seed).key) for seed, v in best if v is not None}
        return {seed: record for seed, record in found.items() if record is not None}

    def needed(self, records: Records) -> list[PlannedRun]:
        """Return the tuning runs, then the best variant's runs on the other seeds once it is known."""
        if self.method.search:
            return [self.run(variant, seed) for seed in self.seeds for variant in self.variants]
        tuning = [self.run(variant, self.seeds[0]) for variant in self.variants]
        best = self.best_variant(records)
        return tuning + ([] if best is None else [self.run(best, seed) for seed in self.seeds[1:]])

    def waiting_count(self, records: Records) -> int:
        """Return the number of runs that wait for the result of the tuning."""
        waits = not self.method.search and self.best_variant(records) is None
        return len(self.seeds) - 1 if waits else 0


class Worklist:
    """The runs that some experiments need at a scale. Experiments share runs with the same key.

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
        overrides = {} if data_dir is None else {"data": {"dir": data_dir}}
        self.cells: dict[str, Cell] = {}
        for name in dict.fromkeys(cell for e in self.experiments for cell in e.cells):
            setting_name, _, method_name = name.partition(":")
            setting, method = tables.setting(setting_name, scale), tables.method(method_name)
            self.cells[name] = Cell(setting, method, range(1, seeds + 1), overrides)

    def needed(self, records: Records) -> list[PlannedRun]:
        """Return the needed runs, the cheapest first. Runs that wait for a tuning are not listed."""
        runs = {run.key: run for cell in self.cells.values() for run in cell.needed(records)}
        seconds = self.estimated_seconds(runs.values(), records)
        return sorted(runs.values(), key=lambda run: seconds[run.key])

    def missing(self, records: Records) -> list[PlannedRun]:
        """Return the needed runs without a record."""
        return [run for run in self.needed(records) if records.get(run.key) is None]

    def waiting(self, records: Records) -> list[tuple[Cell, int]]:
        """Return the cells with runs that wait for the result of their tuning, and how many wait."""
        counts = ((cell, cell.waiting_count(records)) for cell in self.cells.values())
        return [(cell, count) for cell, count in counts if count]

    def estimated_seconds(self, runs: Iterable[PlannedRun], records: Records) -> dict[str, float]:
        """Return the estimated time of each run on one core, by its key."""
        names = {cell.setting.name for cell in self.cells.values()}
        dropout_seconds = {name: self._dropout_seconds(name, records) for name in names}
        return {run.key: dropout_seconds[run.setting] * run.cost for run in runs}

    def remaining_seconds(self, records: Records) -> float:
        """Return the estimated time of all missing and waiting runs on one core."""
        missing = self.estimated_seconds(self.missing(records), records).values()
        waiting = (
            self._dropout_seconds(cell.setting.name, records) * cell.method.cost * count
            for cell, count in self.waiting(records)
        )
        return sum(missing) + sum(waiting)

    def _dropout_seconds(self, setting: str, records: Records) -> float:
        """Return the time of a run of plain dropout: from records, or else from settings.toml."""
        cells = [cell for cell in self.cells.values() if cell.setting.name == setting]
        runs = (cell.run(v, seed) for cell in cells for v in cell.variants for seed in cell.seeds)
        seconds = [record.seconds / r.cost for r in runs if (record := records.get(r.key))]
        return statistics.median(seconds) if seconds else cells[0].setting.seconds
