"""The scoreboard's runs: the search on seed 0, then every method on the reported seeds."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from undrop.files import naming_disk_errors, read_json, write_json
from undrop.lab.scoreboard.run import Spec, execute
from undrop.lab.scoreboard.tasks import TASKS

TUNING_SEED = 0
"""The seed of every search; the reported seeds are 1, 2, …"""
_SLOWER = 1.05  # the cost of a step from which a run at equal time has fewer epochs

RunRecords = dict[str, dict[str, Any]]  # by key


@dataclass(frozen=True)
class Method:
    """A way to train, and the options that are searched for."""

    label: str
    kind: str
    dropped: bool = False  # whether p is searched for
    decayed: bool = False  # whether the weight decay is searched for, at the best p


METHODS = {
    "none": Method("nothing", "none"),
    "decay": Method("weight decay", "none", decayed=True),
    "dropout": Method("dropout", "dropout", dropped=True),
    "dropout-decay": Method("dropout + decay", "dropout", dropped=True, decayed=True),
    "analytic": Method("Analytic", "analytic", dropped=True),
    "analytic-decay": Method("Analytic + decay", "analytic", dropped=True, decayed=True),
    "analytic-quarter-step": Method("Analytic, ε₀ = 1/4", "analytic:0.25", dropped=True),
    "analytic-whole-step": Method("Analytic, ε₀ = 1", "analytic:1", dropped=True),
    "tuner": Method("tuner (dropout)", "tuner"),
}
"""The methods by name."""


class Board:
    """The runs of one task on ``seeds`` reported seeds, and the results in its records."""

    def __init__(self, task: str, records: RunRecords, seeds: int) -> None:
        self.name, self.task, self.records = task, TASKS[task], records
        self.seeds = range(1, seeds + 1)
        self.methods = {n: m for n, m in METHODS.items() if n not in self.task.refused}

    def missing(self) -> list[Spec]:
        """Return the runs that can be done now and have no record."""
        return [s for s in dict.fromkeys(self._needed()) if s.key not in self.records]

    def _needed(self) -> Iterator[Spec]:
        for method in self.methods.values():
            yield from self._tries(method)
        for name in self.methods:
            for timed in (False, True):
                found = self.chosen(name, timed=timed)
                yield from () if found is None else (replace(found, seed=s) for s in self.seeds)

    def _tries(self, method: Method) -> Iterator[Spec]:
        """The search: p first, then the decay at the best p."""
        epochs = self.task.epochs
        start = Spec(self.name, method.kind, 0.2, 0.0, TUNING_SEED, epochs)
        by_p = [replace(start, p=p) for p in self.task.probabilities] if method.dropped else [start]
        yield from by_p
        best = self._best(by_p)
        if method.decayed and best is not None:
            yield from (replace(best, decay=decay) for decay in self.task.decays)

    def _best(self, tries: Sequence[Spec]) -> Spec | None:
        """The best by validation; None until all are tried."""
        if any(s.key not in self.records for s in tries):
            return None
        return min(tries, key=lambda s: float(self.records[s.key]["validation"]))

    def chosen(self, name: str, *, timed: bool) -> Spec | None:
        """Return the run that the search chose; if ``timed``, with the epochs of dropout's time."""
        method = METHODS[name]
        tries = list(self._tries(method))
        done = not method.decayed or len(tries) > 1 + len(self.task.probabilities) * method.dropped
        best = self._best(tries) if done else None
        cost = self.cost(name)
        if best is None or not timed:
            return best
        if cost is None:
            return None
        fit = best.epochs if cost < _SLOWER else max(1, int(best.epochs / cost))
        return replace(best, epochs=fit)

    def cost(self, name: str) -> float | None:
        """Return the processor seconds of a step divided by dropout's, from the search."""
        own, plain = self._pace(METHODS[name].kind), self._pace("dropout")
        return None if own is None or plain is None else own / plain

    def _pace(self, kind: str) -> float | None:
        paces = [
            record["seconds"] / record["steps"]
            for record in self.records.values()
            if record["spec"]["task"] == self.name
            and record["spec"]["kind"] == kind
            and record["spec"]["seed"] == TUNING_SEED
        ]
        return statistics.median(paces) if paces else None

    def losses(self, name: str, *, timed: bool) -> dict[int, float]:
        """Return the test losses of a method by seed."""
        chosen = self.chosen(name, timed=timed)
        if chosen is None:
            return {}
        runs = {seed: self.records.get(replace(chosen, seed=seed).key) for seed in self.seeds}
        return {seed: run["test"] for seed, run in runs.items() if run is not None}


def read_records(folder: Path) -> RunRecords:
    """Return the records in a folder, by key."""
    return {path.stem: read_json(path) for path in sorted((folder / "records").glob("*.json"))}


def run_board(
    folder: Path,
    root: Path,
    *,
    tasks: Iterable[str] = tuple(TASKS),
    seeds: int = 5,
    jobs: int = 1,
    say: Callable[[Spec, dict[str, Any]], None] = lambda spec, record: None,
) -> int:
    """Do the runs that have no record yet, task by task, and return the number of records.

    Args:
        folder: the folder of results; records are in its ``records/``.
        root: the folder of the corpora.
        tasks: names of ``TASKS``.
        seeds: the number of reported seeds.
        jobs: runs at a time, with one thread each.
        say: called with each new record.
    """
    with naming_disk_errors(folder):
        (folder / "records").mkdir(parents=True, exist_ok=True)
    records = read_records(folder)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        for task in tasks:
            while missing := Board(task, records, seeds).missing():
                waiting = {pool.submit(execute, s, str(root.absolute())): s for s in missing}
                for future in as_completed(waiting):
                    spec, record = waiting[future], future.result()
                    records[spec.key] = record
                    write_json(folder / "records" / f"{spec.key}.json", record)
                    say(spec, record)
    return len(records)
