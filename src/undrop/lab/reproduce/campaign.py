"""Campaigns: run what a plan is missing, and keep every record as it comes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from undrop.errors import UndropError
from undrop.lab.reproduce.executors import Executor
from undrop.lab.reproduce.plan import Plan, Run
from undrop.lab.reproduce.records import Record, Records
from undrop.lab.reproduce.worker import epochs_done

__all__ = ["Campaign", "Listener", "Status"]


@dataclass(frozen=True)
class Status:
    """How far a campaign is.

    Attributes:
        total: the number of runs, including those that were done before.
        done: the number of runs that have a record.
        seconds_done: the estimated seconds of the work done by this process, on one core.
        seconds_left: the estimated seconds of the work that is left.
    """

    total: int
    done: int
    seconds_done: float
    seconds_left: float


class Listener:
    """Is called while a campaign runs; a no-op to subclass."""

    def status(self, status: Status) -> None:
        """Called now and then with how far the campaign is."""

    def ended(self, run: Run, record: Record) -> None:
        """Called when a run has its record."""

    def failed(self, run: Run, error: UndropError) -> None:
        """Called when a run has failed."""


@dataclass
class Campaign:
    """The missing runs of a plan, on an executor.

    Attributes:
        plan: the runs to do.
        folder: the folder of results, with finished records in ``records/`` and runs in ``runs/``.
        executor: does the runs.
        listener: is called while the campaign runs.
    """

    plan: Plan
    folder: Path
    executor: Executor
    listener: Listener = field(default_factory=Listener)

    def __post_init__(self) -> None:
        self.records = Records(self.folder / "records")
        self._failed: dict[str, UndropError] = {}
        self._done_now = 0.0

    def run(self) -> list[UndropError]:
        """Do the missing runs, tuning first, and return the errors of those that failed.

        Raises:
            StoppedError: if a signal asked to stop; the next call resumes the runs under way.
        """
        self._sweep()
        while missing := self._runnable():
            self._run_all(missing)
        return list(self._failed.values())

    def _sweep(self) -> None:
        """Remove the folders of runs that have a record: a kill came between the two."""
        for run in self.plan.needed(self.records):
            if self.records.get(run.key) is not None:
                self._remove(run)

    def _remove(self, run: Run) -> None:
        shutil.rmtree(self._scratch(run), ignore_errors=True)

    def _runnable(self) -> list[Run]:
        missing = self.plan.missing(self.records)
        return [run for run in missing if run.key not in self._failed]

    def _run_all(self, runs: Sequence[Run]) -> None:
        estimates = self.plan.estimates(runs, self.records)
        open_runs = {run.key: run for run in runs}

        def look() -> None:
            under_way = sum(
                estimates[key] * epochs_done(self._scratch(run)) / run.config.train.epochs
                for key, run in open_runs.items()
            )
            self.listener.status(self._status(under_way))

        for run, outcome in self.executor.outcomes(runs, self._scratch, look):
            del open_runs[run.key]
            if isinstance(outcome, Record):
                self.records.add(outcome)
                self._remove(run)
                self._done_now += estimates[run.key]
                self.listener.ended(run, outcome)
            else:
                self._failed[run.key] = outcome
                self.listener.failed(run, outcome)
            look()

    def _status(self, under_way: float) -> Status:
        missing = self.plan.missing(self.records)
        later = sum(count for _, count in self.plan.waiting(self.records))
        needed = len(self.plan.needed(self.records))
        return Status(
            total=needed + later,
            done=needed - len(missing),
            seconds_done=self._done_now + under_way,
            seconds_left=max(0.0, self.plan.remaining(self.records) - under_way),
        )

    def _scratch(self, run: Run) -> Path:
        return (self.folder / "runs" / run.key[:16]).absolute()
