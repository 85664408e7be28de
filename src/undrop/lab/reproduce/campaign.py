"""A campaign does the missing runs of a plan, and saves every record when its run ends."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from undrop.errors import UndropError
from undrop.lab.reproduce.executors import Executor
from undrop.lab.reproduce.plan import Plan, PlannedRun
from undrop.lab.reproduce.records import Record, Records
from undrop.lab.reproduce.worker import epochs_done


@dataclass(frozen=True)
class Status:
    """How far a campaign is; seconds are estimates, on one core."""

    total: int  # runs, including those of earlier campaigns
    done: int  # runs that have a record
    seconds_done: float  # of the work that this process did
    seconds_left: float


class Listener:
    """Follows a campaign. Override the methods you need; they do nothing by default."""

    def status(self, status: Status) -> None:
        """Called about twice a second with the progress of the campaign."""

    def ended(self, run: PlannedRun, record: Record) -> None:
        """Called when a run has ended and its record is saved."""

    def failed(self, run: PlannedRun, error: UndropError) -> None:
        """Called when a run has failed."""


@dataclass
class Campaign:
    """The missing runs of a plan, on an executor."""

    plan: Plan
    folder: Path  # of results: records are in its records/, runs that have not ended in runs/
    executor: Executor
    listener: Listener = field(default_factory=Listener)

    def __post_init__(self) -> None:
        self.records = Records(self.folder / "records")
        self._failed: dict[str, UndropError] = {}
        self._done_now = 0.0

    def run(self) -> list[UndropError]:
        """Do the missing runs, tuning first, and return the errors of those that failed.

        Raises:
            StoppedError: if a signal asked to stop; the next call resumes the unfinished runs.
        """
        self._sweep()
        while missing := self._runnable():
            self._run_all(missing)
        return list(self._failed.values())

    def _sweep(self) -> None:
        """Remove the folders of runs that have a record: a process was killed between the two."""
        for run in self.plan.needed(self.records):
            if self.records.get(run.key) is not None:
                self._remove(run)

    def _remove(self, run: PlannedRun) -> None:
        shutil.rmtree(self._scratch(run), ignore_errors=True)

    def _runnable(self) -> list[PlannedRun]:
        missing = self.plan.missing(self.records)
        return [run for run in missing if run.key not in self._failed]

    def _run_all(self, runs: Sequence[PlannedRun]) -> None:
        estimates = self.plan.estimates(runs, self.records)
        open_runs = {run.key: run for run in runs}

        def look() -> None:
            unfinished = sum(
                estimates[key] * epochs_done(self._scratch(run)) / run.config.train.epochs
                for key, run in open_runs.items()
            )
            self.listener.status(self._status(unfinished))

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

    def _status(self, unfinished: float) -> Status:
        missing = self.plan.missing(self.records)
        later = sum(count for _, count in self.plan.waiting(self.records))
        needed = len(self.plan.needed(self.records))
        return Status(
            total=needed + later,
            done=needed - len(missing),
            seconds_done=self._done_now + unfinished,
            seconds_left=max(0.0, self.plan.remaining(self.records) - unfinished),
        )

    def _scratch(self, run: PlannedRun) -> Path:
        return (self.folder / "runs" / run.key[:16]).absolute()
