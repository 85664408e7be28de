"""Campaigns at the smallest scale: runs that finish, stop, resume, diverge and fail."""

import json
import subprocess
from dataclasses import replace

import pytest

from fake_records import InProcess
from undrop.errors import NonFiniteError, StoppedError
from undrop.lab.reproduce import worker as worker_module
from undrop.lab.reproduce.campaign import EXECUTORS, Campaign, Listener
from undrop.lab.reproduce.records import Records, short_key
from undrop.lab.reproduce.worker import execute_run, git_commit
from undrop.lab.reproduce.worklist import Worklist


class RecordingListener(Listener):
    def __init__(self):
        self.statuses, self.records, self.errors = [], [], []

    def status(self, status):
        self.statuses.append(status)

    def ended(self, run, record):
        self.records.append(record)

    def failed(self, run, error):
        self.errors.append(error)


def campaign(folder, names, seeds=1, executor=None):
    listener = RecordingListener()
    worklist = Worklist(names, "smoke", seeds)
    return Campaign(worklist, folder, executor or InProcess(1), listener), listener


def test_a_campaign_executes_every_run_once(tmp_path):
    first, listener = campaign(tmp_path, ["noise-put-back"])
    assert first.run() == []
    assert len(listener.records) == len(list((tmp_path / "records").iterdir())) == 3
    assert not list((tmp_path / "runs").iterdir())
    assert (listener.statuses[-1].done, listener.statuses[-1].total) == (3, 3)
    assert listener.statuses[-1].seconds_left == 0.0
    again, listener = campaign(tmp_path, ["noise-put-back"])
    assert again.run() == []
    assert listener.records == []


def test_a_record_has_all_that_is_needed_to_repeat_its_run(tmp_path):
    once, listener = campaign(tmp_path, ["taylor"])
    once.run()
    record = listener.records[0]
    assert record.config["data"]["dir"] is None
    assert record.versions.keys() >= {"undrop", "torch", "python"}
    assert record.machine["device"] == "cpu"
    assert record.commit == git_commit()
    assert len(record.curve.epoch) == len(record.curve.train_ppl) == 2
    assert record.best_valid_ppl == pytest.approx(min(record.curve.valid_ppl), rel=1e-5)
    assert 0.0 < record.curve.evaluation[0] < record.curve.seconds[0] < record.curve.seconds[1]
    assert record.curve.seconds[1] <= record.seconds
    shares = record.probed
    assert shares["taylor_share"] == pytest.approx(shares["quadratic"] / shares["dropped"])
    twice, listener = campaign(tmp_path / "b", ["taylor"])
    twice.run()
    assert listener.records[0].curve.valid_ppl == record.curve.valid_ppl
    assert listener.records[0].probed == record.probed


@pytest.mark.parametrize(
    "error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)], ids=["none", "slow"]
)
def test_a_record_has_no_commit_if_git_does_not_answer(monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(worker_module, "_git", fail)
    assert git_commit() is None


def test_the_first_seed_tries_all_variants_and_the_others_run_the_best(tmp_path):
    tuned, listener = campaign(tmp_path, ["loss-hessian"], seeds=2)
    tuned.worklist.cells = {"ptb:l2": tuned.worklist.cells["ptb:l2"]}
    tuned.run()
    cell = tuned.worklist.cells["ptb:l2"]
    *trials, last = listener.records
    assert [record.seed for record in trials] == [1] * len(cell.variants)
    assert len({status.total for status in listener.statuses}) == 1
    best = min(trials, key=lambda record: record.best_valid_ppl)
    assert (last.seed, last.config["objective"]) == (2, best.config["objective"])
    assert list(cell.best_records(tuned.records)) == [1, 2]


def test_a_run_that_is_stopped_resumes_and_continues_its_stopwatch(tmp_path, monkeypatch):
    run = Worklist(["replace-dropout"], "smoke", 1).cells["ptb:drop-1"].run(0, 1)
    whole = execute_run(run, str(tmp_path / "whole"))

    class Stopping(worker_module.Stopwatch):
        def record(self, record):
            super().record(record)
            if record["kind"] == "epoch" and record["epoch"] == 1:
                raise StoppedError("asked to stop.")

    folder = tmp_path / "runs" / run.key[:16]
    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "Stopwatch", Stopping)
        with pytest.raises(StoppedError):
            execute_run(run, str(folder))
    assert worker_module.epochs_done(folder) == 1
    before = json.loads((folder / "times.json").read_text())["1"][0]
    resumed = execute_run(run, str(folder))
    assert resumed.curve.valid_ppl == whole.curve.valid_ppl
    assert resumed.curve.seconds[1] > before


def test_a_run_keeps_its_folder_until_its_record_is_saved(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    first, _ = campaign(tmp_path, ["taylor"])
    with monkeypatch.context() as patch:
        patch.setattr(Records, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.run()
    again, listener = campaign(tmp_path, ["taylor"])
    monkeypatch.setattr("undrop.lab.train.trainer.Trainer._take_step", interrupted)
    assert again.run() == []  # without another training step
    assert len(listener.records) == 1
    assert not list((tmp_path / "runs").iterdir())


def test_a_leftover_folder_of_a_finished_run_is_removed(tmp_path):
    first, _ = campaign(tmp_path, ["taylor"])
    first.run()
    run = next(iter(first.worklist.cells.values())).run(0, 1)
    leftover = tmp_path / "runs" / short_key(run.key)
    leftover.mkdir()
    again, _ = campaign(tmp_path, ["taylor"])
    again.run()
    assert not leftover.exists()


def test_a_run_with_a_probe_and_the_same_run_without_it_have_different_folders(tmp_path):
    first, _ = campaign(tmp_path, ["taylor"])
    run = next(iter(first.worklist.cells.values())).run(0, 1)
    assert run.probe is not None
    folders = {first._folder_of(run), first._folder_of(replace(run, probe=None))}
    assert len(folders) == 2


def test_a_run_that_diverges_has_a_record(tmp_path, monkeypatch):
    run = Worklist(["replace-dropout"], "smoke", 1).cells["ptb:drop-1"].run(0, 1)

    class Diverging(worker_module.Stopwatch):
        def step(self, done, tokens, parts):
            if done > 0.6:
                raise NonFiniteError("the loss is nan.")
            super().step(done, tokens, parts)

    monkeypatch.setattr(worker_module, "Stopwatch", Diverging)
    record = execute_run(run, str(tmp_path / "run"))
    assert (record.ended, record.test_ppl) == ("diverged", None)
    assert record.curve.epoch == [1]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "cache"))
    broken, listener = campaign(tmp_path, ["noise-put-back"])
    (tmp_path / "runs").mkdir()
    failing = broken.worklist.cells["ptb:drop-4"].run(0, 1)
    (tmp_path / "runs" / failing.key[:16]).write_text("a file where a folder should be")
    errors = broken.run()
    assert len(errors) == len(listener.errors) == 1
    assert "can't be" in str(errors[0])
    assert len(listener.records) == 2


@pytest.mark.parametrize("name", ["local", "ray"])
def test_workers_give_the_same_record_as_this_process(tmp_path, monkeypatch, name):
    if name == "ray":
        pytest.importorskip("ray")
        monkeypatch.setenv("RAY_worker_niceness", "0")  # 15 by default: too slow on a busy machine
    in_process, _ = campaign(tmp_path / "in-process", ["taylor"])
    in_process.run()
    by_workers, listener = campaign(tmp_path / "workers", ["taylor"], executor=EXECUTORS[name](1))
    assert by_workers.run() == []
    expected = next(iter(in_process.records))
    record = next(iter(Records(tmp_path / "workers" / "records")))
    assert record.curve.valid_ppl == expected.curve.valid_ppl
    assert record.machine["threads"] == 1
    assert len(listener.records) == 1
