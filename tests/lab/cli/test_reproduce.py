"""`undrop reproduce` and `undrop report` at the smallest scale."""

import json
import re
import signal
import subprocess
import sys

import pytest

from fake_records import InProcess
from undrop.lab import cli
from undrop.lab.reproduce import campaign, tables


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Make an empty folder the current one, and run without worker processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(campaign.EXECUTORS._entries, "local", InProcess)
    return tmp_path


def undrop(capsys, *words):
    code = cli.main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_dry_run_lists_missing_runs_with_their_time(here, capsys):
    code, out, _ = undrop(capsys, "reproduce", "loss-hessian", "--scale", "smoke", "--dry-run")
    assert code == 0
    assert "ptb l2(weight=3e-06) seed 1" in out
    assert "ptb l2, the best variant, 2 more seeds" in out
    # Every variant on the first seed, and on the two others each method once.
    methods = [tables.method(name) for name in tables.experiment("loss-hessian").methods]
    missing = sum(len(method.variants()) + 2 for method in methods)
    assert f"0 runs are done, {missing} are missing: about" in " ".join(out.split())
    assert not list(here.iterdir())


def test_reproduce_runs_once_and_report_summarizes(here, capsys):
    words = ["reproduce", "noise-put-back", "taylor", "--scale", "smoke", "--seeds", "2"]
    code, out, err = undrop(capsys, *words)
    assert code == 0
    assert "8 records in results/smoke: see `undrop report results/smoke`." in out
    assert err.count("best validation") == 8
    assert re.search(r"\[8/8, about \d+ s left\]", err)  # more than 0 on a busy machine
    code, out, err = undrop(capsys, *words)
    assert (code, err) == (0, "")
    one = next((here / "results/smoke/records").iterdir())
    record = json.loads(one.read_text())
    record["config"]["train"]["color"] = "red"
    (one.parent / "old.json").write_text(json.dumps(record))
    code, out, err = undrop(capsys, *words)
    assert (code, err) == (0, "ignored 1 record with settings that no longer exist.\n")
    report = ["report", "results/smoke", "--experiment", "noise-put-back"]
    code, out, _ = undrop(capsys, *report)
    assert code == 0
    assert out.split() == [
        f"results/smoke/{name}" for name in ("report.html", "report.md", "claims.json")
    ]
    claims = json.loads((here / "results/smoke/claims.json").read_text())
    assert [claim["seeds"] for claim in claims] == [2, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reproduce", "figure-1"], "unknown experiment 'figure-1': there are averaging-noise,"),
        (
            ["reproduce", "--scale", "tiny"],
            "unknown scale 'tiny': there are smoke, small, medium, paper.",
        ),
        (["reproduce", "--executor", "slurm"], "unknown executor 'slurm': there are local, ray."),
        (["report", "nowhere", "--scale", "small"], "nowhere has no records: run `undrop"),
        (["report", "nowhere"], "there is no folder nowhere: `undrop reproduce` writes one."),
        (
            ["report", "scoreboard", "--experiment", "taylor"],
            "the scoreboard is one page: leave out --experiment.",
        ),
        (
            ["report", "."],
            ". is not named after a scale: add --scale (smoke, small, medium, paper).",
        ),
    ],
)
def test_errors_of_reproduce_and_report_are_one_sentence(here, capsys, words, message):
    code, _, err = undrop(capsys, *words)
    assert code == 2
    assert message in err


def test_a_failed_run_is_printed_and_the_exit_code_is_1(here, capsys):
    (here / "results/smoke").mkdir(parents=True)
    (here / "results/smoke/runs").write_text("a file where a folder should be")
    code, _, err = undrop(capsys, "reproduce", "taylor", "--scale", "smoke", "--seeds", "1")
    assert code == 1
    assert "ptb-taylor dropout(k=1) seed 1 failed: " in err


def test_a_signal_stops_reproduce_and_the_same_command_resumes(tmp_path):
    words = [sys.executable, "-m", "undrop", "reproduce", "noise-put-back", "--scale", "smoke"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert "best validation" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert (
            "stopped: run the same command again to resume." in process.communicate(timeout=60)[1]
        )
    assert process.returncode == 130
    kept = set((tmp_path / "results/smoke/records").iterdir())
    assert kept
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "9 records in results/smoke" in done.stdout
    assert done.stderr.count("best validation") == 9 - len(kept)
