"""``undrop bench``: the table, the JSON file and the figure."""

import json
import sys

import pytest

import undrop.lab.bench as bench_module
from undrop.lab.bench import METHODS, bench
from undrop.lab.cli import main

NAMES = (
    "none",
    "dropout",
    "drop8",
    "reverse-explicit",
    "reverse-both",
    "tangent-both",
    "antithetic-both",
    "antithetic-both-quarter",
    "antithetic-both-eighth",
)


def test_bench_methods_keep_their_names():
    assert tuple(METHODS) == NAMES


def test_bench_writes_json_and_a_plot(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # slow steps have wide numbers, which would break names
    figures, picture = tmp_path / "out.json", tmp_path / "out.png"
    command = ["bench", "--model", "mlp", "--size", "small", "--rounds", "2", "--no-memory"]
    code = main([*command, "--save", str(figures), "--plot", str(picture)])
    assert not code
    out, err = capsys.readouterr()
    assert "antithetic-both-quarter" in out
    assert "memory" not in out
    assert err.splitlines() == [f"written: {figures}", f"written: {picture}"]
    result = json.loads(figures.read_text())
    assert (result["model"], result["size"]) == ("mlp", "small")
    assert [row["name"] for row in result["rows"]] == list(NAMES)
    assert set(result["rows"][0]) == {"name", "ratio", "low", "high", "seconds", "peak_mb"}
    dropout = next(row for row in result["rows"] if row["name"] == "dropout")
    assert dropout["ratio"] == dropout["low"] == dropout["high"] == 1.0
    drop8 = next(row for row in result["rows"] if row["name"] == "drop8")
    assert drop8["ratio"] > 2.0
    assert picture.stat().st_size > 5000


def test_bench_prints_json_like_the_other_commands(capsys):
    command = ["bench", "--model", "mlp", "--methods", "none", "--rounds", "1", "--no-memory"]
    assert not main([*command, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in result["rows"]] == ["none", "dropout"]


def test_peak_memory_is_measured_in_a_separate_process():
    row = bench("mlp", "small", rounds=1, names=["dropout"])[0]
    assert row.peak_mb > 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "awd-lsmt"), "unknown bench model 'awd-lsmt': did you mean 'awd-lstm'?"),
        (("--size", "huge"), "unknown bench size 'huge': there are small, paper."),
        (("--methods", "fast"), "unknown bench method 'fast': there are none, dropout,"),
        (("--threads", "-1"), "'--threads': it must be greater than or equal to 0."),
        (("--save", "."), ". can't be written: it is a folder; give the name of a file."),
        (("--plot", "nowhere/x.png"), "can't be written: there is no folder nowhere."),
    ],
)
def test_bad_options_are_refused_before_a_process_starts(
    tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_module, "_peak_memory", None)  # calling it would fail
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err


def test_a_method_whose_process_dies_has_no_peak(monkeypatch):
    monkeypatch.setattr(
        bench_module, "_send_peak_memory", sys.exit
    )  # its arguments end the process
    rows = bench("mlp", "small", rounds=1, names=["dropout"])
    assert [row.peak_mb for row in rows] == [None]
