"""Where runs are run: processes on this machine, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from undrop.errors import OptionError, StoppedError, UndropError, UnknownNameError
from undrop.reproduce.plan import Run
from undrop.reproduce.records import Record
from undrop.reproduce.worker import execute, single_threaded

__all__ = ["EXECUTORS", "Executor", "Local", "Outcome", "RayCluster", "executor_named"]

Outcome: TypeAlias = tuple[Run, Record | UndropError]
"""A run and its record, or why there is none."""

_LOOK = 0.5
"""Seconds between two looks at what is under way."""


class Executor(ABC):
    """Runs runs, as many at a time as it has room for.

    Args:
        jobs: how many at a time.
    """

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise OptionError(f"jobs must be at least 1, got {jobs}.")
        self.jobs = jobs

    @abstractmethod
    def outcomes(
        self, runs: Sequence[Run], scratch: Callable[[Run], Path], look: Callable[[], None]
    ) -> Iterator[Outcome]:
        """Run all, in order; yield each as it ends.

        Args:
            runs: what to run.
            scratch: the folder of a run's work.
            look: called now and then while runs are under way.
        """


class Local(Executor):
    """Processes on this machine, with one thread each."""

    def outcomes(
        self, runs: Sequence[Run], scratch: Callable[[Run], Path], look: Callable[[], None]
    ) -> Iterator[Outcome]:
        """Run all in a pool of processes; those under way when it must end save their state."""
        # A forked child would inherit torch's threads in an unknown state.
        context = multiprocessing.get_context("spawn")
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(self.jobs, mp_context=context, initializer=single_threaded)
        try:
            waiting: dict[Future[Record], Run] = {
                pool.submit(execute, run, str(scratch(run))): run for run in runs
            }
            while waiting:
                done, _ = wait(waiting, timeout=_LOOK, return_when=FIRST_COMPLETED)
                look()
                for future in done:
                    yield waiting.pop(future), _outcome(future.result)
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # a training that hears of it saves its state first
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class RayCluster(Executor):
    """Tasks of one core each on a Ray cluster: the one that RAY_ADDRESS names, or one of our own."""

    def outcomes(
        self, runs: Sequence[Run], scratch: Callable[[Run], Path], look: Callable[[], None]
    ) -> Iterator[Outcome]:
        """Run all as tasks, at most ``jobs`` at a time."""
        ray = _ray()
        ours = not ray.is_initialized()
        if ours:
            room = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": self.jobs}
            ray.init(include_dashboard=False, log_to_driver=False, **room)
        try:
            task = ray.remote(num_cpus=1, max_retries=1)(_execute_anywhere)
            gpus = ray.cluster_resources().get("GPU", 0) > 0
            queue, waiting = list(runs), dict[Any, Run]()
            while queue or waiting:
                while queue and len(waiting) < self.jobs:
                    run = queue.pop(0)
                    # A task sees a GPU only if it asks for one.
                    asked = task.options(num_gpus=int(gpus and run.config.train.device != "cpu"))
                    waiting[asked.remote(run, str(scratch(run)))] = run
                done, _ = ray.wait(list(waiting), timeout=_LOOK)
                look()
                for reference in done:
                    yield waiting.pop(reference), _outcome(partial(_result, ray, reference))
        finally:
            if ours:
                ray.shutdown()


def _execute_anywhere(run: Run, scratch: str) -> Record:
    single_threaded()
    return execute(run, scratch)


def _result(ray: Any, reference: Any) -> Record:
    try:
        record: Record = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    return record


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise OptionError(
            "the executor 'ray' needs the ray package: pip install 'undrop[ray]'."
        ) from error
    return ray


def _outcome(result: Callable[[], Record]) -> Record | UndropError:
    """The record, or the sentence that says why there is none. Being stopped is not an outcome."""
    try:
        return result()
    except StoppedError:
        raise
    except UndropError as error:
        return error


EXECUTORS: dict[str, type[Executor]] = {"local": Local, "ray": RayCluster}
"""The executors by name."""


def executor_named(name: str, jobs: int) -> Executor:
    """The executor of that name."""
    if name not in EXECUTORS:
        raise UnknownNameError("executor", name, EXECUTORS)
    return EXECUTORS[name](jobs)
