"""What all commands share: the help, the options, the printed answers and the errors."""

import importlib
import inspect
import io
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer

from undrop.errors import DataError
from undrop.lab import cli, corpora


@pytest.fixture
def failing(monkeypatch):
    """Return a function that makes `undrop data info` raise an error, and returns `cli.main`."""

    def failing(error):
        def load(*_, **__):
            raise error

        monkeypatch.setattr(corpora, "load", load)
        return cli.main

    return failing


def test_help_lists_every_command_with_its_line(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in cli.commands():
        assert f" {name} " in shown
    assert "List corpora, download them, and show what is in them." in shown


def test_undrop_without_arguments_shows_the_help(capsys):
    assert cli.main([]) == 0
    assert "Usage: undrop" in capsys.readouterr().out


@pytest.mark.parametrize("command", [[], ["plot"], ["data", "info"]])
def test_h_is_short_for_help(capsys, command):
    assert cli.main([*command, "--help"]) == 0
    long = capsys.readouterr().out
    assert cli.main([*command, "-h"]) == 0
    assert capsys.readouterr().out == long
    assert " ".join(["Usage: undrop", *command]) in long


def test_every_command_has_a_group_and_a_line():
    grouped = [name for names in cli.GROUPS.values() for name in names]
    assert set(grouped) <= set(cli.commands())
    assert list(cli.commands())[: len(grouped)] == grouped
    assert all(line.endswith(".") for line in cli.commands().values())


def test_help_fits_80_columns(capsys):
    for command in [[], *([name] for name in cli.commands()), ["data", "info"]]:
        assert cli.main([*command, "--help"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_new_command_is_one_file(tmp_path, monkeypatch, capsys):
    code = (
        '"""Say hello."""\nfrom undrop.lab.cli import COMMANDS\n\n'
        '@COMMANDS.register("hello")\ndef hello(name: str = "you") -> None:\n    print("hello", name)\n'
    )
    (tmp_path / "hello.py").write_text(code)
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    assert cli.main(["--help"]) == 0
    more = capsys.readouterr().out.split("More:\n")[1]
    assert more.split() == ["hello", "Say", "hello."]
    assert cli.main(["hello", "--name", "me"]) == 0
    assert capsys.readouterr().out == "hello me\n"


ANSWER = """
from undrop.lab.cli import COMMANDS, Answer
from undrop.report import Table

@COMMANDS.register("count")
def count(most: int = 2) -> Answer:
    table = Table(("n",), [(str(n),) for n in range(most)])
    return Answer({"most": most}, table, "done", files=[(None, print), (most, print)])

@COMMANDS.register("count silently")
def silently(most=2):
    pass
"""


def test_a_command_that_returns_an_answer_prints_text_or_json(tmp_path, monkeypatch, capsys):
    (tmp_path / "count.py").write_text(f'"""Count."""\n{ANSWER}')
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    monkeypatch.setattr(cli.COMMANDS, "_entries", {})
    command = importlib.import_module("undrop.lab.cli.count")
    shown = cli._typer_function(command.count)
    shown(most=3)
    assert capsys.readouterr() == ("n\n0\n1\n2\ndone\n3\n", "written: 3\n")
    shown(most=3, json=True)
    assert capsys.readouterr().out == '{\n  "most": 3\n}\n3\n'
    assert "json" not in inspect.signature(cli._typer_function(command.silently)).parameters


@pytest.mark.parametrize("name", list(cli.commands()))
def test_a_file_registers_the_command_of_its_name(name):
    importlib.import_module(f"undrop.lab.cli.{name.replace('-', '_')}")
    assert name in {key.partition(" ")[0] for key in cli.COMMANDS}


def test_help_imports_no_command():
    code = (
        "import sys, undrop.lab.cli as c\n"
        "c.main(['--help'])\n"
        "print('undrop.lab.cli.data' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "False"


def test_the_script_and_python_m_print_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"undrop {version('undrop')}\n"
    command = [sys.executable, "-m", "undrop", "--version"]
    assert subprocess.check_output(command, text=True) == f"undrop {version('undrop')}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dta"], "unknown command 'dta': did you mean 'data'? There are demo, train, watch, runs"),
        (["data", "inf"], "No such command 'inf'. Did you mean 'info'? See `undrop data --help`."),
        (
            ["data", "list", "--jsn"],
            "No such option --jsn. Did you mean --json? See `undrop data li",
        ),
        (["data", "info"], "Missing argument 'name'. See `undrop data info --help`."),
        (
            ["diagnose", "--compare", "a.json"],
            "'--compare' requires 2 arguments. See `undrop diagnose --help`.",
        ),
        (
            ["diagnose", "--seconds", "five"],
            "Invalid value for '--seconds': it must be a valid number. See `undrop diagnose",
        ),
        (
            ["bench", "--threads", "-1"],
            "Invalid value for '--threads': it must be greater than or equal to 0. See `undrop",
        ),
        (["train", "--model", "mine:net"], "use undrop.Analytic() in your own loop."),
    ],
)
def test_a_wrong_command_line_is_one_sentence_with_a_way_out(capsys, words, sentence):
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert sentence in shown.err
    assert len(shown.err.splitlines()) == 1


def test_an_error_is_one_sentence_and_exit_code_2(capsys, failing):
    assert failing(DataError("it is not there."))(["data", "info", "pydocs"]) == 2
    assert capsys.readouterr().err == "error: it is not there.\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("no_color", "colored"), [(None, True), ("", True), ("1", False)])
def test_the_label_of_an_error_is_red_on_a_terminal_unless_no_color_is_set(
    monkeypatch, failing, no_color, colored
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert failing(DataError("it is not there."))(["data", "info", "pydocs"]) == 2
    assert ("\x1b[" in terminal.getvalue()) == colored
    assert terminal.getvalue().endswith(" it is not there.\n")


def test_a_long_error_breaks_between_words_on_a_terminal(monkeypatch, failing):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    sentence = "wikitext-103 is not there: download it, or name the folder that holds its texts."
    assert failing(DataError(sentence))(["data", "info", "pydocs"]) == 2
    lines = re.sub(r"\x1b\[\d*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(lines) == f"error: {sentence}"


@pytest.mark.parametrize(
    "words", [["--debug", "data", "info", "pydocs"], ["data", "info", "pydocs", "--debug"]]
)
def test_debug_shows_the_traceback_anywhere_in_the_command_line(capsys, failing, words):
    assert failing(DataError("it is not there."))(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("error: it is not there.\n")


def test_the_environment_variable_undrop_debug_shows_the_traceback(capsys, failing, monkeypatch):
    monkeypatch.setenv("UNDROP_DEBUG", "1")
    assert failing(DataError("it is not there."))(["data", "info", "pydocs"]) == 2
    assert capsys.readouterr().err.startswith("Traceback")


def test_an_os_error_is_one_sentence(capsys, failing):
    assert failing(PermissionError(13, "Permission denied", "a/b"))(["data", "info", "pydocs"]) == 2
    assert (
        capsys.readouterr().err
        == "error: the operating system reports an error for a/b: permission denied.\n"
    )


def test_ctrl_c_exits_with_130(capsys, failing):
    assert failing(KeyboardInterrupt())(["data", "info", "pydocs"]) == 130
    assert capsys.readouterr().err == "error: interrupted.\n"


def test_a_command_can_choose_its_exit_code(failing):
    assert failing(typer.Exit(7))(["data", "info", "pydocs"]) == 7


def test_an_unexpected_exception_is_raised(failing):
    with pytest.raises(ZeroDivisionError):
        failing(ZeroDivisionError())(["data", "info", "pydocs"])


def test_a_closed_pipe_is_not_an_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "undrop", "data", "list", "--json"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")
