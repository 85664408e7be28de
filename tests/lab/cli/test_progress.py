"""The progress of training and of campaigns: bars on a terminal, lines elsewhere."""

import io

import pytest
from rich.console import Console

from fake_records import fake_record
from undrop.errors import RunError
from undrop.lab.cli import _progress
from undrop.lab.cli._progress import CampaignProgress, DemoProgress, TrainingProgress
from undrop.lab.reproduce.campaign import Status
from undrop.lab.reproduce.worklist import Worklist
from undrop.lab.train.callbacks import RunInfo
from undrop.report import Progress

INFO = RunInfo(
    name="run",
    model="awd-lstm",
    objective="analytic",
    corpus="ptb",
    parameters=1234,
    vocabulary=10,
    train_tokens=5000,
    device="cpu",
    epochs=4,
    step=20,
    done=0.25,
)
STEP = {
    "kind": "step",
    "epoch": 2,
    "step": 50,
    "loss": 5.5,
    "explicit": 0.25,
    "implicit": None,
    "time": {"seconds": 3.0, "tokens_per_second": 12345.0},
}
EPOCH = {
    "kind": "epoch",
    "epoch": 2,
    "step": 60,
    "train_ppl": None,
    "valid_ppl": 99.5,
    "test_ppl": 98.25,
    "time": {"seconds": 65.0},
}
WATCH = {
    "kind": "watch",
    "epoch": 2,
    "step": 55,
    "half_quadratic": 0.125,
    "share/input": 0.25,
    "share/output": 0.75,
    "xi_norm": 0.5,
}


@pytest.fixture(autouse=True)
def _no_throttle(monkeypatch):
    monkeypatch.setattr(_progress, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr("undrop.report.progress._REFRESH_SECONDS", 0.0)


def console(*, terminal, width=80):
    return Console(file=io.StringIO(), width=width, force_terminal=terminal)


def report(reporter):
    reporter.begin(INFO)
    reporter.step(0.3, 700, {"loss": 5.5, "explicit": 0.25})
    reporter.record(STEP)
    reporter.record(WATCH)
    reporter.record(EPOCH)
    reporter.say("a remark")
    reporter.close()


def test_without_a_terminal_every_record_of_a_run_is_a_line():
    where = console(terminal=False)
    report(TrainingProgress(Progress(console=where)))
    shown = where.file.getvalue()
    assert "run: awd-lstm with 1,234 parameters on 5,000 tokens of ptb (10 words)" in shown
    assert "resumed at 25%" in shown
    assert "epoch 2/4  step 50  loss 5.500  explicit 0.250  12,345 tokens/s" in shown
    assert "epoch 2/4  step 55  ½uᵀHu 0.125, 75% of it at output  ‖ξ‖ 0.5" in shown
    assert "epoch 2/4  step 60  validation 99.50  test 98.25  1 min 05 s" in shown
    assert "a remark" in shown
    assert "\x1b" not in shown


def test_on_a_terminal_steps_move_a_bar_and_epochs_are_lines():
    where = console(terminal=True, width=120)
    report(TrainingProgress(Progress(console=where)))
    shown = where.file.getvalue()
    for part in ("epoch 2/4", "30%", "tokens/s", "loss 5.500  explicit 0.250", " left"):
        assert part in shown
    assert "validation 99.50" in shown
    assert "step 50" not in shown


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bars_fit_the_terminal(width):
    where = console(terminal=True, width=width)
    with Progress(console=where, keep=True) as progress:
        for title in ("no regularization", "dropout"):
            demo = DemoProgress(progress, title, 17)
            demo.begin(INFO)
            demo.step(0.3, 700, {"loss": 5.5, "explicit": 0.25, "implicit": 0.125})
            demo.record(EPOCH)
    lines = where.file.getvalue().replace("\r", "\n").split("\n")
    assert any("no regularization" in line and "2/4  validation 99.50" in line for line in lines)
    assert max(len(line) for line in lines if "\x1b" not in line) < width


@pytest.mark.parametrize("terminal", [False, True])
def test_a_campaign_prints_each_run_that_ends(terminal):
    where = console(terminal=terminal)
    run = Worklist(["taylor"], "smoke", 1).cells["ptb-taylor:drop-1"].run(0, 1)
    with Progress(console=where) as progress:
        campaign = CampaignProgress(progress, jobs=2)
        campaign.status(Status(total=4, done=1, seconds_done=10.0, seconds_left=240.0))
        campaign.ended(run, fake_record(run, [99.5], seconds=65.0))
        campaign.failed(run, RunError("it was killed."))
    shown = where.file.getvalue()
    assert "best validation 99.50 (epoch 1), 1 min 05 s" in shown
    assert "failed: it was killed." in shown
    assert "about 2 min 00 s left" in shown
    assert ("[2/4, about" in shown) != terminal
    assert ("1/4 runs" in shown) == terminal
