"""Loggers and callbacks receive every record, and do not change the run."""

import csv
import os
import random
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tiny_run import bits
from undrop.errors import ConfigError, MissingExtraError, StoppedError
from undrop.lab import train
from undrop.lab.train import LOGGERS, Callback, Logger, RunFolder


class StopAt(Callback):
    """Sends SIGINT at a step."""

    def __init__(self, step):
        self.steps_left = step

    def step(self, done, tokens, parts):
        self.steps_left -= 1
        if self.steps_left == 0:
            os.kill(os.getpid(), signal.SIGINT)


class Norms(Callback):
    """A user's callback that returns a number every fifth step, and draws from every generator."""

    kind = "norms"

    def observe(self, trainer, inputs, targets):
        torch.rand(3), np.random.rand(3), random.random()
        if trainer.step % 5:
            return None
        assert inputs["tokens"].shape == targets.shape
        return {"norm": float(sum(p.detach().square().sum() for p in trainer.model.parameters()))}


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def expected_rows(folder, kind):
    """Return the records of one kind as the rows of a CSV file."""
    expected = []
    for record in RunFolder(folder).metrics.read():
        if record.pop("kind") == kind:
            times = record.pop("time")
            values = {**record, **times}
            expected.append({k: "" if v is None else str(v) for k, v in values.items()})
    return expected


def test_the_csv_logger_writes_every_record(tiny, tmp_path):
    out = tmp_path / "a"
    train.run(tiny(train={"loggers": ["csv"]}), out=out)
    for kind in ("step", "epoch"):
        assert rows(out / "csv" / f"{kind}.csv") == expected_rows(out, kind) != []


def test_the_csv_logger_of_a_resumed_run_has_no_gaps_and_no_repetitions(tiny, tmp_path):
    out, config = tmp_path / "a", tiny(train={"loggers": "csv", "epochs": 3, "log_every": 1})
    for step in (4, 9, 20):
        with pytest.raises(StoppedError):
            train.run(config, out=out, resume=True, callbacks=[StopAt(step)])
    with (out / "csv" / "step.csv").open("a") as file:
        file.write("99,99,a row that a killed process wrote after its last checkpoint\n")
    train.run(config, out=out, resume=True)
    assert rows(out / "csv" / "step.csv") == expected_rows(out, "step")
    assert rows(out / "csv" / "epoch.csv") == expected_rows(out, "epoch")


def test_a_new_column_of_the_csv_logger_is_empty_in_earlier_rows(tiny, tmp_path):
    folder = RunFolder(tmp_path)
    logger = LOGGERS["csv"](folder, tiny())
    logger.begin(None)
    for record in ({"kind": "a", "x": 1}, {"kind": "a", "x": 2, "y": 3}, {"kind": "a", "y": 4}):
        folder.metrics.append(record)
        logger.record(record)
    expected = [{"x": "1", "y": ""}, {"x": "2", "y": "3"}, {"x": "", "y": "4"}]
    assert rows(tmp_path / "csv" / "a.csv") == expected


def test_the_tensorboard_log_of_a_resumed_run_has_every_step_once(tiny, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "a"
    config = tiny(train={"tensorboard": True, "log_every": 1, "checkpoint_every": 1000})
    assert config.train.loggers == ("tensorboard",)
    with pytest.raises(StoppedError):
        train.run(config, out=out, callbacks=[StopAt(5)])
    newest = RunFolder(out).checkpoints.path(5)
    newest.write_bytes(b"")  # now the run resumes from its first step
    train.run(config, out=out, resume=True)
    events = accumulator.EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert {"epoch/valid_ppl", "step/loss", "step/tokens_per_second"} <= set(
        events.Tags()["scalars"]
    )
    steps = [event.step for event in events.Scalars("step/loss")]
    assert steps == list(range(1, 31))


class FakeWandb(SimpleNamespace):
    """A stand-in for the part of W&B that the logger uses."""

    def __init__(self):
        super().__init__(started=[], logged=[], summary={}, finished=0)

    def init(self, **options):
        self.started.append(options)
        return self

    def log(self, values, *, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


def test_the_wandb_logger_logs_every_number_and_resumes_the_same_run(tiny, tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "dropout")
    out, config = tmp_path / "first", tiny(train={"loggers": ["wandb"], "epochs": 1})
    with pytest.raises(StoppedError):
        train.run(config, out=out, callbacks=[StopAt(8)])
    assert wandb.finished == 1
    summary = train.run(config, out=out, resume=True)
    first, second = wandb.started
    assert first == second
    assert (first["project"], first["name"], first["resume"]) == ("dropout", "first", "allow")
    assert first["config"] == config.as_dict()
    records = RunFolder(out).metrics.read()
    assert [step for step, _ in wandb.logged] == [record["step"] for record in records]
    assert wandb.logged[-1][1]["epoch/valid_ppl"] == summary.valid_ppl
    assert wandb.summary["best_valid_ppl"] == summary.best_valid_ppl
    assert wandb.finished == 2


def test_a_logger_whose_package_is_missing_is_refused_before_training(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"train.loggers needs wandb: pip install"):
        train.run(tiny(train={"loggers": ["wandb"]}), out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_config_can_name_a_registered_logger(tiny, tmp_path, monkeypatch):
    logged = []

    class Mine(Logger):
        def log(self, values, step):
            logged.append((step, values))

    monkeypatch.setitem(LOGGERS._entries, "mine", Mine)
    train.run(tiny(train={"loggers": ["mine"], "epochs": 1}), out=tmp_path / "a")
    assert logged[-1][1]["epoch/valid_ppl"] > 1.0
    with pytest.raises(ConfigError, match=r"unknown logger 'tensorbord': did you mean 'tensorb"):
        tiny(train={"loggers": ["tensorbord"]})


def test_loggers_do_not_change_the_digest_of_a_config(tiny):
    assert tiny(train={"loggers": ["csv"]}).digest() == tiny().digest()


def test_a_callback_adds_to_the_metrics_and_does_not_change_the_run(tiny, tmp_path):
    config = tiny(objective={"name": "dropout"}, train={"epochs": 2})
    train.run(config, out=tmp_path / "plain")
    train.run(config, out=tmp_path / "observed", callbacks=[Norms()])
    plain, observed = bits(tmp_path / "plain"), bits(tmp_path / "observed")
    norms = [r for r in observed["metrics"] if r["kind"] == "norms"]
    assert [r["step"] for r in norms] == list(range(5, 31, 5))
    assert all(r["norm"] > 0.0 for r in norms)
    observed["metrics"] = [r for r in observed["metrics"] if r["kind"] != "norms"]
    assert observed == plain


def test_a_callback_is_closed_when_the_run_fails(tiny, tmp_path):
    class Failing(Callback):
        closed = 0

        def record(self, record):
            raise RuntimeError("the user's own mistake")

        def close(self):
            self.closed += 1

    callback = Failing()
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        train.run(tiny(), out=tmp_path / "a", callbacks=[callback])
    assert callback.closed == 1
