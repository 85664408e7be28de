"""What every command shares: how it is found, and what its errors look like."""

import importlib
import io
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer

from undrop.errors import DataError
from undrop.lab import cli, corpora


@pytest.fixture
def failing(monkeypatch):
    """Make `undrop data info` raise."""

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
    assert "The corpora: list them, get them, look into them." in shown


def test_no_words_at_all_are_a_call_for_help(capsys):
    assert cli.main([]) == 0
    assert "Usage: undrop" in capsys.readouterr().out


@pytest.mark.parametrize("command", [[], ["plot"], ["data", "info"]])
def test_h_is_short_for_help(capsys, command):
    assert cli.main([*command, "--help"]) == 0
    long = capsys.readouterr().out
    assert cli.main([*command, "-h"]) == 0
    assert capsys.readouterr().out == long
    assert " ".join(["Usage: undrop", *command]) in long


def test_every_command_has_its_place_and_its_line():
    commands = cli.commands()
    assert set(commands) <= set(cli.ORDER)
    assert list(commands) == [name for name in cli.ORDER if name in commands]
    assert all(line.endswith(".") for line in commands.values())


@pytest.mark.parametrize("name", list(cli.commands()))
def test_a_file_registers_the_command_it_is_called_after(name):
    app = typer.Typer()
    importlib.import_module(f"undrop.lab.cli.{name.replace('-', '_')}").register(app)
    assert [info.name for info in (*app.registered_commands, *app.registered_groups)] == [name]


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


def test_the_version_from_either_door(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"undrop {version('undrop')}\n"
    command = [sys.executable, "-m", "undrop", "--version"]
    assert subprocess.check_output(command, text=True) == f"undrop {version('undrop')}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dta"], "No such command 'dta'. Did you mean 'data'? See `undrop --help`."),
        (["data", "inf"], "No such command 'inf'. Did you mean 'info'? See `undrop data --help`."),
        (["data", "list", "--jsn"], "(Possible options: --json). See `undrop data list --help`."),
        (["data", "info"], "Missing argument 'name'. See `undrop data info --help`."),
    ],
)
def test_a_slip_of_the_keys_gets_the_nearest_name(capsys, words, sentence):
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.rstrip().endswith(sentence)
    assert len(shown.err.splitlines()) == 1


def test_an_error_is_one_sentence_and_exit_code_2(capsys, failing):
    assert failing(DataError("it is not there."))(["data", "info", "x"]) == 2
    assert capsys.readouterr().err == "error: it is not there.\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("no_color", "colour"), [(None, True), ("", True), ("1", False)])
def test_an_error_is_red_on_a_terminal_unless_it_is_asked_not_to_be(
    monkeypatch, failing, no_color, colour
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert failing(DataError("it is not there."))(["data", "info", "x"]) == 2
    assert ("\x1b[" in terminal.getvalue()) == colour
    assert terminal.getvalue().endswith(" it is not there.\n")


@pytest.mark.parametrize(
    "words", [["--debug", "data", "info", "x"], ["data", "info", "x", "--debug"]]
)
def test_debug_shows_the_traceback_wherever_it_stands(capsys, failing, words):
    assert failing(DataError("it is not there."))(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("error: it is not there.\n")


def test_debug_by_the_environment(capsys, failing, monkeypatch):
    monkeypatch.setenv("UNDROP_DEBUG", "1")
    assert failing(DataError("it is not there."))(["data", "info", "x"]) == 2
    assert capsys.readouterr().err.startswith("Traceback")


def test_what_the_system_refuses_is_one_sentence(capsys, failing):
    assert failing(PermissionError(13, "Permission denied", "a/b"))(["data", "info", "x"]) == 2
    assert capsys.readouterr().err == "error: the system refused a/b: permission denied.\n"


def test_ctrl_c_is_130(capsys, failing):
    assert failing(KeyboardInterrupt())(["data", "info", "x"]) == 130
    assert capsys.readouterr().err == "error: interrupted.\n"


def test_a_command_chooses_its_own_exit_code(failing):
    assert failing(typer.Exit(7))(["data", "info", "x"]) == 7


def test_a_bug_is_not_hidden(failing):
    with pytest.raises(ZeroDivisionError):
        failing(ZeroDivisionError())(["data", "info", "x"])


def test_a_reader_that_has_had_enough_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "undrop", "data", "list", "--json"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, "")


def test_the_shell_completes_commands_and_theirs():
    environment = {
        **os.environ,
        "_UNDROP_COMPLETE": "complete_bash",
        "COMP_WORDS": "undrop data ",
        "COMP_CWORD": "2",
    }
    command = [
        sys.executable,
        "-c",
        "import sys; from undrop.lab.cli import main; sys.exit(main())",
    ]
    shown = subprocess.check_output(command, env=environment, text=True)
    assert shown.split() == ["list", "get", "info"]
