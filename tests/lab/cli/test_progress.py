import io

import pytest
from rich.console import Console

from undrop.lab.cli._progress import Bar, Lines, duration
from undrop.lab.train.callbacks import RunInfo

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
    "time": {"seconds": 65.0, "judging": 1.0},
}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7260, "2 h 01 min"),
    ],
)
def test_durations_are_as_a_person_says_them(seconds, words):
    assert duration(seconds) == words


def played(reporter, stream):
    reporter.begin(INFO)
    reporter.step(0.3, 700, {"loss": 5.5, "explicit": 0.25})
    reporter.record(STEP)
    reporter.record(EPOCH)
    reporter.say("a remark")
    reporter.close()
    return stream.getvalue()


def test_lines_tell_every_record():
    stream = io.StringIO()
    shown = played(Lines(Console(file=stream, width=200)), stream)
    assert "run: awd-lstm of 1,234 parameters on 5,000 tokens of ptb (10 words)" in shown
    assert "from 25% on" in shown
    assert "epoch 2/4  step 50  loss 5.500  explicit 0.250  12,345 tokens/s" in shown
    assert "epoch 2/4  step 60  validation 99.50  test 98.25  1 min 05 s" in shown
    assert "a remark" in shown
    assert "\x1b" not in shown


def test_a_bar_shows_steps_and_tells_epochs(monkeypatch):
    monkeypatch.setattr("undrop.lab.cli._progress._REFRESH", 0.0)
    stream = io.StringIO()
    shown = played(Bar(Console(file=stream, width=200, force_terminal=True)), stream)
    for part in ("epoch 2/4", "30%", "tokens/s", "loss 5.500  explicit 0.250", " left"):
        assert part in shown
    assert "validation 99.50" in shown
    assert "step 50" not in shown
