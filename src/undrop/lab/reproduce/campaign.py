"""A campaign trains the missing runs of a worklist, on this machine or on a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

from undrop.errors import MissingExtraError, OptionError, RunError, StoppedError, UndropError
from undrop.lab.reproduce.records import Record, Records
from undrop.lab.reproduce.worker import epochs_done, execute
from undrop.lab.reproduce.worklist import PlannedRun, Worklist
from undrop.registry import Registry

Outcome: TypeAlias = tuple[PlannedRun, Record | UndropError]
"""A run, and its record or the error that it ended with."""

_INTERVAL = 0.5  # seconds between two checks of the runs

EXECUTORS: Registry[str, type[Executor]] = Registry("executor")
"""The executors by name."""

_KILLED = (
    "its process was killed, perhaps for lack of memory: run the same command to resume it, with a "
    "lower --jobs if memory is short."
)


class Executor(ABC):
    """Executes runs, ``jobs`` at a time."""

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise OptionError(f"jobs must be at least 1, got {jobs}.")
        self.jobs = jobs

    def outcomes(
        self,
        runs: Sequence[PlannedRun],
        scratch: Callable[[PlannedRun], Path],
        tick: Callable[[], None],
    ) -> Iterator[Outcome]:
        """Start the runs in order, and yield each when it ends.

        Args:
            runs: the runs to execute.
            scratch: returns the folder for a run's files.
            tick: called after each check of the runs, about twice a second.
        """
        queue, waiting = list(runs), dict[Future[Record], PlannedRun]()
        with self.opened():
            while queue or waiting:
                # Start no more runs than there are processes: a started run can't be canceled.
                while queue and len(waiting) < self.jobs:
                    run = queue.pop(0)
                    waiting[self.start(run, str(scratch(run)))] = run
                for ended in wait(waiting, _INTERVAL, FIRST_COMPLETED).done:
                    run = waiting.pop(ended)
                    outcome: Record | UndropError
                    try:
                        outcome = self.result(ended)
                    except StoppedError:
                        raise
                    except UndropError as error:
                        outcome = error
                    yield run, outcome
                tick()

    @abstractmethod
    def opened(self) -> AbstractContextManager[None]:
        """Start the workers; after an exception, ask the unfinished runs to save and stop."""

    @abstractmethod
    def start(self, run: PlannedRun, scratch: str) -> Future[Record]:
        """Start a run."""

    def result(self, ended: Future[Record]) -> Record:
        """Return the record of a run that has ended, or raise what it raised."""
        return ended.result()


@EXECUTORS.register("local")
class LocalProcesses(Executor):
    """Processes on this machine, with one thread each."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Start processes, each in its own pool, so that killing one does not break the others."""
        others = set(multiprocessing.active_children())
        self._idle = [_pool_of_one() for _ in range(self.jobs)]
        self._busy: dict[Future[Record], ProcessPoolExecutor] = {}
        try:
            yield
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # a run saves its state on this signal
            raise
        finally:
            for pool in [*self._idle, *self._busy.values()]:
                pool.shutdown()

    def start(self, run: PlannedRun, scratch: str) -> Future[Record]:
        """Give the run to an idle process."""
        pool = self._idle.pop()
        future = pool.submit(_execute_for_parent, run, scratch)
        self._busy[future] = pool
        return future

    def result(self, ended: Future[Record]) -> Record:
        """Return what the process returned; a new process replaces one that was killed."""
        pool = self._busy.pop(ended)
        try:
            return ended.result()
        except BrokenProcessPool as error:
            pool.shutdown()
            pool = _pool_of_one()
            raise RunError(_KILLED) from error
        finally:
            self._idle.append(pool)


def _pool_of_one() -> ProcessPoolExecutor:
    """A pool of one process, which starts with its first run."""
    # A forked child would inherit torch's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Send this process SIGTERM when its parent ends, because nothing else would stop it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait_for_parent, daemon=True).start()


def _execute_for_parent(run: PlannedRun, scratch: str) -> Record:
    try:
        return execute(run, scratch)
    finally:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            os._exit(1)  # the state is saved, and no process waits for the record


@EXECUTORS.register("ray")
class RayCluster(Executor):
    """Tasks of one core each on the Ray cluster at RAY_ADDRESS, or on a new one on this machine."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Join the cluster, or start one on this machine."""
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise MissingExtraError("the executor 'ray'", "ray", "ray") from error
        ours = not self._ray.is_initialized()
        if ours:
            resources = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": self.jobs}
            self._ray.init(include_dashboard=False, log_to_driver=False, **resources)
        try:
            self._gpus = self._ray.cluster_resources().get("GPU", 0) > 0
            yield
        finally:
            if ours:
                self._ray.shutdown()

    def start(self, run: PlannedRun, scratch: str) -> Future[Record]:
        """Start a task, with a GPU if the run needs one: a task sees only what it requests."""
        gpus = int(self._gpus and run.config.train.device != "cpu")
        task = self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=1)(execute)
        started: Future[Record] = task.remote(run, scratch).future()
        return started

    def result(self, ended: Future[Record]) -> Record:
        """Return what the task returned, or raise its own error instead of Ray's."""
        try:
            return ended.result()
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            raise RunError(_KILLED) from error


@dataclass(frozen=True)
class Status:
    """The progress of a campaign; seconds are estimates, on one core."""

    total: int  # runs, including those of earlier campaigns
    done: int  # how many of them have a record
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
    """The missing runs of a worklist, on an executor."""

    worklist: Worklist
    folder: Path  # of results: records are in its records/, runs that have not ended in runs/
    executor: Executor
    listener: Listener = field(default_factory=Listener)

    def __post_init__(self) -> None:
        self.records = Records(self.folder / "records")
        self._failed: dict[str, UndropError] = {}
        self._done_now = 0.0

    def run(self) -> list[UndropError]:
        """Execute the missing runs, tuning first, and return the errors of those that failed.

        Raises:
            StoppedError: if a signal asked to stop; the next call resumes the unfinished runs.
        """
        for run in self.worklist.needed(self.records):
            if self.records.get(run.key) is not None:  # a killed campaign did not remove its folder
                self._remove(run)
        while runs := [r for r in self.worklist.missing(self.records) if r.key not in self._failed]:
            self._run_all(runs)
        return list(self._failed.values())

    def _remove(self, run: PlannedRun) -> None:
        shutil.rmtree(self._scratch(run), ignore_errors=True)

    def _run_all(self, runs: Sequence[PlannedRun]) -> None:
        estimates = self.worklist.estimates(runs, self.records)
        open_runs = {run.key: run for run in runs}

        def tick() -> None:
            unfinished = sum(
                estimates[key] * epochs_done(self._scratch(run)) / run.config.train.epochs
                for key, run in open_runs.items()
            )
            self.listener.status(self._status(unfinished))

        for run, outcome in self.executor.outcomes(runs, self._scratch, tick):
            del open_runs[run.key]
            if isinstance(outcome, Record):
                self.records.add(outcome)
                self._remove(run)
                self._done_now += estimates[run.key]
                self.listener.ended(run, outcome)
            else:
                self._failed[run.key] = outcome
                self.listener.failed(run, outcome)
            tick()

    def _status(self, unfinished: float) -> Status:
        missing = self.worklist.missing(self.records)
        later = sum(count for _, count in self.worklist.waiting(self.records))
        needed = len(self.worklist.needed(self.records))
        return Status(
            total=needed + later,
            done=needed - len(missing),
            seconds_done=self._done_now + unfinished,
            seconds_left=max(0.0, self.worklist.remaining(self.records) - unfinished),
        )

    def _scratch(self, run: PlannedRun) -> Path:
        return (self.folder / "runs" / run.key[:16]).absolute()
