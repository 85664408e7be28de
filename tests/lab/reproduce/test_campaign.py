"""Campaigns at the smallest scale: trained, stopped, resumed, and failed."""

import json

import pytest

from fake_records import InProcess
from undrop.errors import NonFiniteError, StoppedError
from undrop.lab.reproduce import worker as worker_module
from undrop.lab.reproduce.campaign import EXECUTORS, Campaign, Listener
from undrop.lab.reproduce.records import Records
from undrop.lab.reproduce.worker import execute, git_commit
from undrop.lab.reproduce.worklist import Worklist


class RecordingListener(Listener):
    def __init__(self):
        self.states, self.done, self.errors = [], [], []

    def status(self, status):
        self.states.append(status)

    def ended(self, run, record):
        self.done.append(record)

    def failed(self, run, error):
        self.errors.append(error)


def campaign(folder, names, seeds=1, executor=None):
    heard = RecordingListener()
    worklist = Worklist(names, "smoke", seeds)
    return Campaign(worklist, folder, executor or InProcess(1), heard), heard


def test_every_run_gets_one_record_and_no_run_is_done_twice(tmp_path):
    first, heard = campaign(tmp_path, ["noise-put-back"])
    assert first.run() == []
    assert len(heard.done) == len(list((tmp_path / "records").iterdir())) == 3
    assert not list((tmp_path / "runs").iterdir())
    assert (heard.states[-1].done, heard.states[-1].total) == (3, 3)
    assert heard.states[-1].seconds_left == 0.0
    again, heard = campaign(tmp_path, ["noise-put-back"])
    assert again.run() == []
    assert heard.done == []


def test_a_record_holds_everything_that_repeats_the_run(tmp_path):
    once, heard = campaign(tmp_path, ["taylor"])
    once.run()
    record = heard.done[0]
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
    twice, heard = campaign(tmp_path / "b", ["taylor"])
    twice.run()
    assert heard.done[0].curve.valid_ppl == record.curve.valid_ppl
    assert heard.done[0].probed == record.probed


def test_tuning_runs_first_and_its_best_variant_on_every_seed(tmp_path):
    tuned, heard = campaign(tmp_path, ["loss-hessian"], seeds=2)
    tuned.worklist.cells = {"ptb:l2": tuned.worklist.cells["ptb:l2"]}
    tuned.run()
    cell = tuned.worklist.cells["ptb:l2"]
    *tried, last = heard.done
    assert [record.seed for record in tried] == [1] * len(cell.variants)
    assert len({state.total for state in heard.states}) == 1
    best = min(tried, key=lambda record: record.best_valid_ppl)
    assert (last.seed, last.config["objective"]) == (2, best.config["objective"])
    assert list(cell.chosen_records(tuned.records)) == [1, 2]


def test_a_stopped_run_resumes_and_its_time_adds_up(tmp_path, monkeypatch):
    run = Worklist(["replace-dropout"], "smoke", 1).cells["ptb:drop-1"].run(0, 1)
    whole = execute(run, str(tmp_path / "whole"))

    class Stopping(worker_module.Stopwatch):
        def record(self, record):
            super().record(record)
            if record["kind"] == "epoch" and record["epoch"] == 1:
                raise StoppedError("asked to stop.")

    folder = tmp_path / "runs" / run.key[:16]
    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "Stopwatch", Stopping)
        with pytest.raises(StoppedError):
            execute(run, str(folder))
    assert worker_module.epochs_done(folder) == 1
    before = json.loads((folder / "times.json").read_text())["1"][0]
    resumed = execute(run, str(folder))
    assert resumed.curve.valid_ppl == whole.curve.valid_ppl
    assert resumed.curve.seconds[1] > before


def test_the_folder_of_a_run_is_kept_until_its_record_is_on_the_disk(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    first, _ = campaign(tmp_path, ["taylor"])
    with monkeypatch.context() as patch:
        patch.setattr(Records, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.run()
    again, heard = campaign(tmp_path, ["taylor"])
    monkeypatch.setattr("undrop.lab.train.trainer.Trainer._take_step", interrupted)
    assert again.run() == []  # without another training step
    assert len(heard.done) == 1
    assert not list((tmp_path / "runs").iterdir())


def test_a_leftover_folder_of_a_finished_run_is_removed(tmp_path):
    first, _ = campaign(tmp_path, ["taylor"])
    first.run()
    left = tmp_path / "runs" / next(iter(first.worklist.cells.values())).run(0, 1).key[:16]
    left.mkdir()
    again, _ = campaign(tmp_path, ["taylor"])
    again.run()
    assert not left.exists()


def test_a_run_that_diverges_has_a_record(tmp_path, monkeypatch):
    run = Worklist(["replace-dropout"], "smoke", 1).cells["ptb:drop-1"].run(0, 1)

    class Diverging(worker_module.Stopwatch):
        def step(self, done, tokens, parts):
            if done > 0.6:
                raise NonFiniteError("the loss is nan.")
            super().step(done, tokens, parts)

    monkeypatch.setattr(worker_module, "Stopwatch", Diverging)
    record = execute(run, str(tmp_path / "run"))
    assert (record.ended, record.test_ppl) == ("diverged", None)
    assert record.curve.epoch == [1]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "cache"))
    broken, heard = campaign(tmp_path, ["noise-put-back"])
    (tmp_path / "runs").mkdir()
    failing = broken.worklist.cells["ptb:drop-4"].run(0, 1)
    (tmp_path / "runs" / failing.key[:16]).write_text("a file where a folder should be")
    errors = broken.run()
    assert len(errors) == len(heard.errors) == 1
    assert "can't be" in str(errors[0])
    assert len(heard.done) == 2


@pytest.mark.parametrize("name", ["local", "ray"])
def test_local_processes_and_ray_give_the_same_record(tmp_path, monkeypatch, name):
    if name == "ray":
        pytest.importorskip("ray")
        monkeypatch.setenv("RAY_worker_niceness", "0")  # 15 by default: too slow on a busy machine
    near, _ = campaign(tmp_path / "near", ["taylor"])
    near.run()
    far, heard = campaign(tmp_path / "far", ["taylor"], executor=EXECUTORS[name](1))
    assert far.run() == []
    here = next(iter(near.records))
    there = next(iter(Records(tmp_path / "far" / "records")))
    assert there.curve.valid_ppl == here.curve.valid_ppl
    assert there.machine["threads"] == 1
    assert len(heard.done) == 1
