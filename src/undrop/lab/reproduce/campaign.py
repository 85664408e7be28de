"""A campaign executes the missing runs of a worklist, on this machine or on a Ray cluster."""

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
from undrop.lab.reproduce.records import Record, Records, short_key
from undrop.lab.reproduce.worker import epochs_done, execute_run
from undrop.lab.reproduce.worklist import PlannedRun, Worklist
from undrop.registry import Registry

Outcome: TypeAlias = tuple[PlannedRun, Record | UndropError]
"""A run with its record, or with the error that ended it."""

_CHECK_INTERVAL = 0.5  # the longest time between two checks of the runs, in seconds

EXECUTORS: Registry[str, type[Executor]] = Registry("executor")
"""The executors by name."""

_WORKER_KILLED = (
    "its process was killed, perhaps for lack of memory: run the same command to resume the run, with "
    "a lower --jobs if memory is short."
)


class Executor(ABC):
    """Executes up to ``jobs`` runs in parallel."""

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise OptionError(f"jobs must be at least 1, got {jobs}.")
        self.jobs = jobs

    def outcomes(
        self,
        runs: Sequence[PlannedRun],
        folder_of: Callable[[PlannedRun], Path],
        tick: Callable[[], None],
    ) -> Iterator[Outcome]:
        """Start the runs in order, and yield the outcome of each when it ends.

        Args:
            runs: the runs to execute.
            folder_of: returns the folder for a run's files.
            tick: called after each check of the runs, about twice a second.
        """
        queue, started = list(runs), dict[Future[Record], PlannedRun]()
        with self.workers():
            while queue or started:
                # Start no more runs than there are workers: a started run can't be canceled.
                while queue and len(started) < self.jobs:
                    run = queue.pop(0)
                    started[self.start(run, str(folder_of(run)))] = run
                for future in wait(started, _CHECK_INTERVAL, FIRST_COMPLETED).done:
                    run = started.pop(future)
                    try:
                        yield run, self.result(future)
                    except StoppedError:
                        raise
                    except UndropError as error:
                        yield run, error
                tick()

    @abstractmethod
    def workers(self) -> AbstractContextManager[None]:
        """Return a context that starts the workers and stops them at its end.

        After an exception in the context, unfinished runs stop. The next campaign resumes them.
        """

    @abstractmethod
    def start(self, run: PlannedRun, folder: str) -> Future[Record]:
        """Start a run."""

    def result(self, future: Future[Record]) -> Record:
        """Return the record of a run that has ended, or raise the run's error."""
        return future.result()


@EXECUTORS.register("local")
class LocalProcesses(Executor):
    """Processes on this machine, with one thread each."""

    @contextlib.contextmanager
    def workers(self) -> Iterator[None]:
        """Start each process in its own pool, because a killed process breaks its pool."""
        other_children = set(multiprocessing.active_children())
        self._idle_pools = [_pool_of_one() for _ in range(self.jobs)]
        self._busy_pools: dict[Future[Record], ProcessPoolExecutor] = {}
        try:
            yield
        except BaseException:
            for child in set(multiprocessing.active_children()) - other_children:
                child.terminate()  # SIGTERM: a run saves its state
            raise
        finally:
            for pool in [*self._idle_pools, *self._busy_pools.values()]:
                pool.shutdown()

    def start(self, run: PlannedRun, folder: str) -> Future[Record]:
        """Give the run to an idle process."""
        pool = self._idle_pools.pop()
        future = pool.submit(_execute_for_parent, run, folder)
        self._busy_pools[future] = pool
        return future

    def result(self, future: Future[Record]) -> Record:
        """Return the record, or raise the run's error; a new process replaces a killed one."""
        pool = self._busy_pools.pop(future)
        try:
            return future.result()
        except BrokenProcessPool as error:
            pool.shutdown()
            pool = _pool_of_one()
            raise RunError(_WORKER_KILLED) from error
        finally:
            self._idle_pools.append(pool)


def _pool_of_one() -> ProcessPoolExecutor:
    """Return a pool of one process, which starts when the pool gets its first run."""
    # A forked child would inherit torch's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Make this process stop when its parent ends, even if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait_for_parent, daemon=True).start()


def _execute_for_parent(run: PlannedRun, folder: str) -> Record:
    """Execute a run; if the parent has ended meanwhile, end this process afterwards."""
    try:
        return execute_run(run, folder)
    finally:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            os._exit(1)  # the run's state is saved, and nobody waits for the record


@EXECUTORS.register("ray")
class RayCluster(Executor):
    """Ray tasks of one core each, on the cluster at RAY_ADDRESS or on a new one on this machine."""

    @contextlib.contextmanager
    def workers(self) -> Iterator[None]:
        """Join the cluster, or start one and shut it down at the end."""
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise MissingExtraError("the executor 'ray'", "ray", "ray") from error
        starts_ray = not self._ray.is_initialized()
        if starts_ray:
            resources = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": self.jobs}
            self._ray.init(include_dashboard=False, log_to_driver=False, **resources)
        try:
            self._has_gpus = self._ray.cluster_resources().get("GPU", 0) > 0
            yield
        finally:
            if starts_ray:
                self._ray.shutdown()

    def start(self, run: PlannedRun, folder: str) -> Future[Record]:
        """Start a task. It requests a GPU if the run may use one: without a request it sees none."""
        gpus = int(self._has_gpus and run.config.train.device != "cpu")
        task = self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=1)(execute_run)
        future: Future[Record] = task.remote(run, folder).future()
        return future

    def result(self, future: Future[Record]) -> Record:
        """Return the record, or raise the run's error in place of Ray's."""
        try:
            return future.result()
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            raise RunError(_WORKER_KILLED) from error


@dataclass(frozen=True)
class Status:
    """The progress of a campaign. The seconds are estimates for one core."""

    total: int  # the number of runs, including those of earlier campaigns
    done: int  # the number of runs with a record
    seconds_done: float  # of this campaign's work
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
    """Executes the missing runs of a worklist with an executor."""

    worklist: Worklist
    folder: Path  # for results: the records in its records/, the unfinished runs in its runs/
    executor: Executor
    listener: Listener = field(default_factory=Listener)

    def __post_init__(self) -> None:
        self.records = Records(self.folder / "records")
        self._errors: dict[str, UndropError] = {}
        self._seconds_done = 0.0

    def run(self) -> list[UndropError]:
        """Execute the missing runs, and return the errors of runs that failed.

        The cheapest runs start first. Runs that wait for the result of a tuning follow it.

        Raises:
            StoppedError: after a signal to stop. The next call resumes the unfinished runs.
        """
        for run in self.worklist.needed(self.records):
            if self.records.get(run.key) is not None:  # a killed campaign may have left the folder
                self._remove_folder(run)
        # When the tuning runs of a method have ended, the worklist needs more runs of its best variant.
        while runs := [r for r in self.worklist.missing(self.records) if r.key not in self._errors]:
            self._run_all(runs)
        return list(self._errors.values())

    def _remove_folder(self, run: PlannedRun) -> None:
        shutil.rmtree(self._folder_of(run), ignore_errors=True)

    def _run_all(self, runs: Sequence[PlannedRun]) -> None:
        seconds = self.worklist.estimated_seconds(runs, self.records)
        unfinished = {run.key: run for run in runs}  # not started yet, or in progress

        def tick() -> None:
            seconds_in_progress = sum(
                seconds[key] * epochs_done(self._folder_of(run)) / run.config.train.epochs
                for key, run in unfinished.items()
            )
            self.listener.status(self._status(seconds_in_progress))

        for run, outcome in self.executor.outcomes(runs, self._folder_of, tick):
            del unfinished[run.key]
            if isinstance(outcome, Record):
                self.records.add(outcome)
                self._remove_folder(run)
                self._seconds_done += seconds[run.key]
                self.listener.ended(run, outcome)
            else:
                self._errors[run.key] = outcome
                self.listener.failed(run, outcome)
            tick()

    def _status(self, seconds_in_progress: float) -> Status:
        """Return the progress, given the estimated time of the finished epochs of unfinished runs."""
        # Needed runs are known: those without a record are missing. Waiting runs depend on a tuning.
        needed = len(self.worklist.needed(self.records))
        waiting = sum(count for _, count in self.worklist.waiting(self.records))
        done = needed - len(self.worklist.missing(self.records))
        left = self.worklist.remaining_seconds(self.records) - seconds_in_progress
        spent = self._seconds_done + seconds_in_progress
        return Status(needed + waiting, done, seconds_done=spent, seconds_left=max(0.0, left))

    def _folder_of(self, run: PlannedRun) -> Path:
        return (self.folder / "runs" / short_key(run.key)).absolute()
