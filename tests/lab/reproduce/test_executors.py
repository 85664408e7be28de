"""Workers that are killed, and workers whose parent is killed."""

import multiprocessing
import os
import select
import signal
import time
from concurrent.futures import Future

import pytest

from fake_records import fake_record
from undrop.errors import RunError, StoppedError
from undrop.lab.reproduce import campaign
from undrop.lab.reproduce.campaign import LocalProcesses, RayCluster
from undrop.lab.reproduce.records import Record
from undrop.lab.train.environment import catch_signals

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def forking(monkeypatch):
    """Fork the workers, which is fast, and let them call a function of the test for each run."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: FORK)

    def set_work(work):
        monkeypatch.setattr(campaign, "execute_run", work)

    return set_work


@pytest.fixture
def runs(worklist):
    return [cell.run(0, 1) for cell in worklist.cells.values()][:3]


def test_a_worker_that_is_killed_fails_its_run_and_no_other(forking, runs, tmp_path):
    def work(run, folder):
        if run.key == runs[0].key:
            os.kill(os.getpid(), signal.SIGKILL)
        return fake_record(run, [2.0])

    forking(work)
    pairs = LocalProcesses(2).outcomes(runs, lambda run: tmp_path, lambda: None)
    outcomes = {run.key: outcome for run, outcome in pairs}
    killed = outcomes.pop(runs[0].key)
    assert isinstance(killed, RunError)
    assert str(killed) == (
        "its process was killed, perhaps for lack of memory: run the same command to resume the run, "
        "with a lower --jobs if memory is short."
    )
    assert len(outcomes) == 2
    assert all(isinstance(outcome, Record) for outcome in outcomes.values())


@pytest.mark.parametrize("state", ["stopping", "finishing", "idle"])
def test_a_worker_ends_when_its_parent_is_killed(forking, runs, tmp_path, state):
    """The worker is in a run that stops or finishes after the signal, or it waits for a run."""
    working = tmp_path / "working"

    def work(run, folder):
        if state == "idle" and run.key == runs[0].key:
            return fake_record(run, [2.0])
        working.touch()
        with catch_signals() as interrupts:
            while interrupts.received is None:
                time.sleep(0.01)
        if state == "stopping":
            raise StoppedError("saved")
        return fake_record(run, [2.0])

    forking(work)
    reading, writing = os.pipe()  # its writing end is closed when the last worker is gone
    jobs = 2 if state == "idle" else 1
    arguments = (runs[:jobs], lambda run: tmp_path, lambda: None)
    parent = FORK.Process(target=lambda: list(LocalProcesses(jobs).outcomes(*arguments)))
    parent.start()
    os.close(writing)
    while not working.exists():
        time.sleep(0.01)
    parent.kill()
    parent.join()
    assert select.select([reading], [], [], 10.0)[0]
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_a_worker_that_ray_loses_is_one_error_of_undrop():
    ray = pytest.importorskip("ray")
    executor, lost = RayCluster(1), Future()
    executor._ray = ray
    lost.set_exception(ray.exceptions.WorkerCrashedError())
    with pytest.raises(RunError, match="was killed"):
        executor.result(lost)
