"""Help, completion and the errors for wrong names do not import torch, so they are fast."""

import os
import resource
import subprocess
import sys

import pytest

from undrop.lab.bench import METHODS, SUBJECTS
from undrop.lab.cli import _names, main
from undrop.lab.corpora import CATALOGUE
from undrop.lab.reproduce.tables import EXPERIMENTS
from undrop.lab.train import MODELS, OBJECTIVES
from undrop.lab.train.config import presets

REGISTRIES = {
    "models": MODELS,
    "objectives": OBJECTIVES,
    "corpora": CATALOGUE,
    "bench_models": SUBJECTS,
    "bench_methods": METHODS,
}


@pytest.mark.parametrize("kind", REGISTRIES)
def test_names_read_from_the_source_code_are_those_of_the_registry(kind):
    names = getattr(_names, kind)()
    assert list(names.items()) == list(REGISTRIES[kind].about.items())
    assert all(names.values())


def test_a_registration_may_have_no_line_and_several_names(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "@THINGS.register('plain')\nclass A: ...\n\n"
        "@THINGS.register('first', 'second', about='Both')\nclass B: ...\n\n"
        "OTHERS.register('other')(A)\nTHINGS.register(computed)(A)\n"
    )
    monkeypatch.setattr(_names, "_PACKAGE", tmp_path)
    expected = {"plain": "", "first": "Both", "second": "Both"}
    assert _names.registered("THINGS") == expected


@pytest.mark.parametrize(
    ("names", "loaded"),
    [(_names.presets(), presets()), (_names.experiments(), EXPERIMENTS)],
    ids=["presets", "experiments"],
)
def test_names_read_from_toml_files_are_those_that_the_workbench_loads(names, loaded):
    assert sorted(names) == sorted(loaded)
    assert all(names.values())


@pytest.mark.parametrize("kind", ["presets", "models", "objectives"])
def test_a_list_command_prints_every_name_with_its_line(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    assert main([kind]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    names = getattr(_names, kind)()
    assert [tuple(line.split(maxsplit=1)) for line in lines] == list(names.items())


FAST = {
    "help": ["--help"],
    "version": ["--version"],
    "help of a command": ["train", "--help"],
    "wrong command": ["trian"],
    "wrong preset": ["train", "--preset", "ptb-awd-lsmt"],
    "wrong model": ["train", "--model=gtp", "--data", "ptb"],
    "wrong model to look into": ["sites", "--model", "gtp", "--data", "ptb"],
    "wrong objective": ["train", "--data", "ptb", "--objective", "analytc"],
    "wrong corpus": ["train", "--data", "ptbb"],
    "wrong bench model": ["bench", "--model", "mpl"],
    "wrong experiment": ["reproduce", "ptb-tabel"],
    "wrong split": ["eval", "run", "--split", "tset"],
    "wrong run": ["diagnose", "no/such/run"],
    "list of objectives": ["objectives"],
}
COMPLETED = {
    "undrop tra": "train",
    "undrop data ": "info",
    "undrop train --preset ptb": "ptb-lstm-tiny",
    "undrop train --model ": "awd-lstm",
    "undrop train --data ": "wikitext-2",
    "undrop train --objective ": "drop-k-analytic",
    "undrop sites --model ": "gpt",
    "undrop bench --model ": "mlp",
    "undrop reproduce ": "ptb-table",
    "undrop data get ": "ptb",
}
PROGRAM = (
    "import sys, undrop.lab.cli\n"
    "try: undrop.lab.cli.main()\n"
    "finally: print('torch' in sys.modules, 'numpy' in sys.modules)"
)


def seconds_and_output(words, **environment):
    """Return the processor time of a command line in a new process, and what it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.stdout.splitlines(), done.stderr


def check_fast(words, **environment):
    """Check that torch is never imported, and that one of five runs is fast: the machine may be busy."""
    times = []
    for _ in range(5):
        seconds, out, err = seconds_and_output(words, **environment)
        assert out[-1] == "False False"
        times.append(seconds)
        if seconds < 0.3:
            return out, err
    pytest.fail(f"it took {min(times):.2f} s of processor time")


@pytest.mark.parametrize("words", FAST.values(), ids=FAST)
def test_a_command_line_that_needs_no_torch_is_fast(words):
    out, err = check_fast(words)
    assert len(out) > 1 or len(err.splitlines()) == 1
    if words[-1] not in ("--help", "--version", "objectives", "no/such/run"):
        assert "did you mean" in err


@pytest.mark.parametrize("typed", COMPLETED)
def test_the_shell_completes_names_fast(typed):
    out, _ = check_fast(
        [],
        _UNDROP_COMPLETE="complete_bash",
        COMP_WORDS=typed,
        COMP_CWORD=str(len(typed.split()) - (not typed.endswith(" "))),
    )
    assert COMPLETED[typed] in out


def test_zsh_and_fish_complete_names_too():
    for shell in ("zsh", "fish"):
        _, out, _ = seconds_and_output(
            [],
            _UNDROP_COMPLETE=f"complete_{shell}",
            _TYPER_COMPLETE_ARGS="undrop train --model ",
            _TYPER_COMPLETE_FISH_ACTION="get-args",
        )
        assert "awd-lstm" in "\n".join(out)
