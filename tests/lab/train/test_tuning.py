"""A run that tunes p sets text aside for that, records p and the benefits, and resumes exactly."""

import json
from importlib.util import find_spec

import pytest
import torch

from tiny_run import bits, tiny_config, write_text
from undrop.errors import DataError, OptionError
from undrop.lab import train
from undrop.lab.cli import main
from undrop.lab.train.tuning import TunerRecorder
from undrop.tuning import Tuner


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDROP_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "text"
    folder.mkdir()
    return write_text(folder)


def records(out, kind):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


@pytest.mark.parametrize("objective", ["dropout", "analytic"])
def test_a_tuned_run_records_p_and_benefit_of_every_site(text, tmp_path, objective):
    config = tiny_config(text, train={"tune": 0.2, "epochs": 4}, objective={"name": objective})
    train.run(config, out=tmp_path / "run", callbacks=[TunerRecorder(interval=20)])
    trials = records(tmp_path / "run", "tune")
    assert [r["step"] for r in trials] == list(range(20, trials[-1]["step"] + 1, 20))
    sites = {key for key in trials[0] if key.startswith("p/")}
    assert {"p/input_dropout", "p/output_dropout"} <= sites
    assert "benefit/every site" in trials[0]
    assert {key for r in trials for key in r if key.startswith("benefit/")} <= {
        "benefit/every site",
        *(key.replace("p/", "benefit/") for key in sites),
    }
    assert trials[0]["p/input_dropout"] != trials[-1]["p/input_dropout"]


def test_a_tuned_run_never_trains_on_what_it_tunes_on(text, tmp_path):
    observed = []

    class Recorder(train.Callback):
        def observe(self, trainer, inputs, targets):
            observed.append((trainer.tuner, inputs["tokens"]))

    train.run(tiny_config(text, train={"tune": 0.2}), out=tmp_path / "run", callbacks=[Recorder()])
    whole = tiny_config(text).load_corpus().train.tolist()
    tuner = observed[0][0]
    tuning = torch.cat([x["tokens"] for x, _ in tuner.validation.batches]).t()
    assert tuning.flatten().tolist() == whole[480:560]
    assert tuning.shape == (4, 20)  # every batch has one window of each of four streams
    first_epoch = [tokens for _, tokens in observed[: len(observed) // 2]]
    streams = torch.cat(first_epoch).t()
    assert [stream.tolist() for stream in streams] == [
        whole[120 * i : 120 * i + 119] for i in range(4)
    ]


def test_all_batches_of_a_trial_begin_without_a_hidden_state(text, tmp_path, monkeypatch):
    states = []
    observe = Tuner.observe

    def record_states(tuner, model, inputs, targets):
        states.extend([inputs["state"], *(x["state"] for x, _ in tuner.validation.batches)])
        return observe(tuner, model, inputs, targets)

    monkeypatch.setattr(Tuner, "observe", record_states)
    train.run(tiny_config(text, train={"tune": 0.2}), out=tmp_path / "run")
    assert states
    assert all(state is None for state in states)


def test_a_tuned_run_resumes_bit_for_bit(text, tmp_path):
    config = tiny_config(text, train={"tune": 0.2, "epochs": 3})
    train.run(config, out=tmp_path / "whole")

    class Stop(train.Callback):
        def step(self, done, tokens, parts):
            if done > 0.5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.run(config, out=tmp_path / "cut", callbacks=[Stop()])
    train.run(config, out=tmp_path / "cut", resume=True)
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


def test_a_share_that_is_too_small_and_an_objective_without_p_are_refused(text, tmp_path):
    with pytest.raises(DataError, match=r"train\.tune = 0\.05 sets 30 of 600 tokens aside"):
        train.run(tiny_config(text, train={"tune": 0.05}), out=tmp_path / "a")
    config = tiny_config(text, train={"tune": 0.2}, objective={"name": "none"})
    with pytest.raises(OptionError, match="needs an Analytic or a Dropout objective"):
        train.run(config, out=tmp_path / "b")


SMALL = [
    *("--set", "model.embedding_size=6", "--set", "model.hidden_size=6", "--set", "model.layers=2"),
    *("--set", "data.batch_size=2", "--set", "data.eval_batch_size=2", "--set", "data.length=5"),
    *("--set", "optimizer.lr=2", "--set", "train.epochs=1"),
]


TWO_EPOCHS = ("--set", "train.epochs=2")


def test_undrop_train_tune_sets_five_percent_aside(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert (
        main(["train", "--data", str(text), *SMALL, *TWO_EPOCHS, "--tune", "--out", str(out)]) == 0
    )
    assert json.loads((out / "config.json").read_text())["train"]["tune"] == 0.05
    assert records(out, "tune")
    shown = " ".join(capsys.readouterr().out.split())
    assert "benefit" in shown
    assert "output_dropout" in shown
    assert (out / "tuning.svg").exists() == (f"p over the steps: {out / 'tuning.svg'}" in shown)
    assert len(list(out.glob("tuning.svg"))) == (find_spec("matplotlib") is not None)


def test_undrop_advise_prints_a_row_for_each_site_and_a_verdict(text, tmp_path, capsys):
    assert main(["advise", "--data", str(text), *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"input_dropout", "output_dropout"} <= set(found["benefit"]["sites"])
    assert found["gap"]["low"] <= found["gap"]["value"] <= found["gap"]["high"]
    assert found["steps"] == 200
    assert main(["advise", "--data", str(text), *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "output_dropout" in printed
    assert found["verdict"] in " ".join(printed.split())
    assert main(["advise", "--data", str(text), *SMALL, "--share", "0"]) == 2
    assert "--share must lie" in capsys.readouterr().err
