"""``undrop bench``: what a program and a person get of it."""

import json
import sys

import pytest

from undrop.bench import METHODS, bench, run
from undrop.cli import main
from undrop.errors import OptionError

NAMES = (
    "none",
    "dropout",
    "drop8",
    "reverse-explicit",
    "reverse-both",
    "tangent-both",
    "antithetic-both",
    "tangent-both-quarter",
)


def test_the_methods_have_the_names_that_others_rely_on():
    assert tuple(METHODS) == NAMES


def test_json_and_plot(tmp_path, capsys):
    figures, picture = tmp_path / "out.json", tmp_path / "out.png"
    command = ["bench", "--model", "mlp", "--size", "small", "--rounds", "2", "--no-memory"]
    code = main([*command, "--json", str(figures), "--plot", str(picture)])
    assert not code
    result = json.loads(figures.read_text())
    assert (result["model"], result["size"]) == ("mlp", "small")
    assert [row["name"] for row in result["rows"]] == list(NAMES)
    assert set(result["rows"][0]) == {"name", "ratio", "low", "high", "seconds", "peak_mb"}
    dropout = next(row for row in result["rows"] if row["name"] == "dropout")
    assert dropout["ratio"] == dropout["low"] == dropout["high"] == 1.0
    drop8 = next(row for row in result["rows"] if row["name"] == "drop8")
    assert drop8["ratio"] > 2.0
    assert picture.stat().st_size > 5000
    assert "tangent-both-quarter" in capsys.readouterr().out


def test_peak_memory_is_measured_in_a_process_of_its_own():
    row = bench("mlp", "small", rounds=1, names=["dropout"])[0]
    assert row.peak_mb > 1.0


def test_unknown_names_are_refused():
    with pytest.raises(OptionError, match="no bench model 'lstm': use one of awd-lstm"):
        bench("lstm", "small")
    with pytest.raises(OptionError, match="no bench size 'huge': use one of small, paper"):
        bench("mlp", "huge")
    with pytest.raises(OptionError, match="no bench method 'fast': use some of none, dropout"):
        bench("mlp", "small", names=["fast"])


def test_a_method_that_memory_does_not_suffice_for_has_no_peak(monkeypatch):
    monkeypatch.setattr(run, "_measure_peak", sys.exit)  # dies, for the arguments it is given
    rows = bench("mlp", "small", rounds=1, names=["dropout"])
    assert [row.peak_mb for row in rows] == [None]
