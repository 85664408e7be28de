"""Every example runs, prints its table, and fits on a screen."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "plain_loop.py": ["--steps", "3", "--seeds", "1"],
    "digits.py": ["--steps", "3", "--seeds", "1"],
    "transformers_trainer.py": ["--steps", "3"],
    "trl_preferences.py": ["--steps", "2", "--seeds", "1"],
    "lightning_fit.py": ["--epochs", "1"],
    "accelerate_processes.py": ["--epochs", "1"],
    "large_model.py": ["--steps", "2"],
}
NEEDS = {"digits.py": "sklearn", "transformers_trainer.py": "transformers"} | {
    "lightning_fit.py": "lightning",
    "trl_preferences.py": "trl",
    "accelerate_processes.py": "accelerate",
}
PARALLEL = {"accelerate_processes.py", "large_model.py"}


def table(printed: str) -> dict[str, str]:
    """The row of each objective."""
    words = ("NoRegularization", "Dropout", "Analytic")
    rows = [line for line in printed.splitlines() if line.startswith(words)]
    return {row.split()[0]: row for row in rows}


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == SMALL.keys()


@pytest.mark.parametrize("name", SMALL)
def test_an_example_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 84


@pytest.mark.parametrize("name", sorted(SMALL.keys() - PARALLEL))
def test_an_example_runs_and_prints_its_table(name, monkeypatch, capsys):
    pytest.importorskip(NEEDS.get(name, "torch"))
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name]])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert len(table(capsys.readouterr().out)) == 3


def test_accelerate_runs_in_two_processes(launch):
    pytest.importorskip("accelerate")
    printed = launch(EXAMPLES / "accelerate_processes.py", *SMALL["accelerate_processes.py"])
    assert printed.startswith("2 processes\n")
    assert len(table(printed)) == 3


def test_the_large_model_runs_in_two_processes(launch):
    first, second = (
        launch(EXAMPLES / "large_model.py", *SMALL["large_model.py"]) for _ in range(2)
    )
    assert first == second
    rows = first.splitlines()
    assert [row.split()[:2] for row in rows] == [["step", "0"], ["step", "1"]]
    assert all("explicit +" in row for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL.keys() - PARALLEL))
def test_an_example_takes_less_than_three_minutes(name):
    """At full size, as a user runs it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert len(table(done.stdout)) == 3


@pytest.mark.slow
def test_analytic_is_as_accurate_as_dropout_on_digits(monkeypatch, capsys):
    """Over five seeds, which differ by about one percentage point."""
    monkeypatch.setattr(sys, "argv", ["digits.py"])
    runpy.run_path(str(EXAMPLES / "digits.py"), run_name="__main__")
    rows = table(capsys.readouterr().out)
    accuracy = {name: float(row.split()[1].rstrip("%")) for name, row in rows.items()}
    assert accuracy["Analytic"] > accuracy["NoRegularization"]
    assert accuracy["Analytic"] > accuracy["Dropout"] - 1.0
