"""The command line: ``undrop COMMAND``, one file per command.

Every file of this folder is a command, unless its name starts with an underscore: ``train.py`` is
``undrop train``. The first line of the file's docstring is the command's line in ``undrop --help``. The
file registers one function, or one function for each subcommand::

    @COMMANDS.register("train")
    def train(...): ...

    @COMMANDS.register("data list")
    def list_corpora(...): ...

The arguments of the function are the options of the command, and its docstring is the help. Options that
several commands share are the fields of a dataclass, which is the type of one argument. A function that
returns an :class:`Answer` gets the option ``--json``.

``undrop --help`` imports no command, and ``undrop train`` imports only ``train.py``. A command imports
torch inside its function, so that help, completion and the error for a wrong name are fast.

If something goes wrong, a command raises an :class:`~undrop.errors.UndropError`. :func:`main` prints it
as one sentence on stderr and returns the exit code 2; ``--debug`` adds the traceback. Results go to
stdout, everything else to stderr.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from undrop.lab.cli._names import check_name
from undrop.lab.cli._output import Answer, report_error
from undrop.registry import Registry

__all__ = ["COMMANDS", "GROUPS", "Answer", "app_for", "commands", "main"]

COMMANDS: Registry[str, Callable[..., Answer | None]] = Registry("command")
"""The functions of the commands that have been imported."""

GROUPS = {
    "Train": ("demo", "train", "watch", "runs", "plot", "eval", "generate"),
    "Look into dropout": ("sites", "diagnose", "advise", "check", "bound"),
    "Compare and reproduce": ("bench", "reproduce", "report"),
    "List what is available": ("presets", "models", "objectives", "data"),
}
"""The headings of ``undrop --help``. Commands that have no heading come last, under "More"."""

_COMPLETION = "_UNDROP_COMPLETE"  # the variable that asks for completion
# The variable with the words that were typed, in bash and in the other shells.
_TYPED_WORDS = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")


def commands() -> dict[str, str]:
    """Return the name of every command and its line of help, in the order of ``--help``."""
    files = [file for folder in __path__ for file in Path(folder).glob("[!_]*.py")]
    lines = {file.stem.replace("_", "-"): _first_line(file) for file in files}
    grouped = [name for names in GROUPS.values() for name in names if name in lines]
    return {name: lines[name] for name in [*grouped, *sorted(lines.keys() - set(grouped))]}


def _first_line(file: Path) -> str:
    """Return the first line of a file's docstring, without parsing the file."""
    with file.open(encoding="utf-8") as text:
        return text.readline().strip().strip('"')


class _CommandsWithHeadings(TyperGroup):
    """A group of commands whose help has headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the headings of :data:`GROUPS`, and the others under "More"."""
        rest = commands()
        width = max(map(len, rest))
        for heading, names in [*GROUPS.items(), ("More", tuple(rest))]:
            rows = [(name.ljust(width), rest.pop(name)) for name in names if name in rest]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def app_for(names: Sequence[str]) -> typer.Typer:
    """Return an app that can run the commands ``names``, which are imported; it lists all commands."""
    app = typer.Typer(
        name="undrop",
        cls=_CommandsWithHeadings,
        no_args_is_help=True,
        rich_markup_mode=None,  # importing rich would take longer than the rest of --help
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},  # every command inherits them
    )
    app.callback()(_root)
    for name, line in commands().items():
        if name in names:
            _add(app, name)
        else:
            app.command(name, help=line)(lambda: None)
    return app


def _add(app: typer.Typer, name: str) -> None:
    """Import the file of a command, and add the command or its subcommands to the app."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    for words, function in COMMANDS.items():
        command, _, subcommand = words.partition(" ")
        if command == name:
            (group if subcommand else app).command(subcommand or name)(_typer_function(function))
    if group.registered_commands:
        app.add_typer(group, name=name, help=module.__doc__)


def _typer_function(function: Callable[..., Answer | None]) -> Callable[..., None]:
    """Return the function for typer, which has an argument for each option and prints the answer."""
    signature = inspect.signature(function, eval_str=True)
    dataclasses: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if is_dataclass(parameter.annotation):
            dataclasses[name] = parameter.annotation
            options += inspect.signature(dataclasses[name], eval_str=True).parameters.values()
        else:
            options.append(parameter)
    if signature.return_annotation not in (None, signature.empty):
        options.append(_JSON)

    @wraps(function)
    def typer_function(*, json: bool = False, **values: Any) -> None:
        for name, kind in dataclasses.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        answer = function(**values)
        if answer is not None:
            answer.show(json=json)

    typer_function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[option.replace(kind=option.KEYWORD_ONLY) for option in options],
        return_annotation=None,
    )
    return typer_function


_JSON = inspect.Parameter(
    "json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")],
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        from undrop import __version__

        typer.echo(f"undrop {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, as UNDROP_DEBUG=1 does.")
    ] = False,
) -> None:
    """Take dropout apart: measure what it does to a model, and train without it."""


def _command_in(words: Sequence[str]) -> list[str]:
    """Return the command, the first word without a dash, as a list that is empty without a command.

    undrop's own options take no values, so no value can be mistaken for the command.
    """
    return [word for word in words if not word.startswith("-")][:1]


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` by default) and return its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    gc.disable()  # imports leave little garbage, and collecting it takes a quarter of their time
    try:
        return _exit_code(words)
    finally:
        gc.enable()
        if args is None:  # the process ends: the system frees the memory faster than Python does
            gc.freeze()


def _exit_code(words: list[str]) -> int:
    """Complete the words, or run them as a command line, and return the exit code."""
    if _COMPLETION in os.environ:
        typed = next((os.environ[name] for name in _TYPED_WORDS if name in os.environ), "")
        return int(app_for(_command_in(typed.split()[1:]))(words, prog_name="undrop") or 0)
    debug = "--debug" in words or os.environ.get("UNDROP_DEBUG", "0") not in ("", "0")
    words = [word for word in words if word != "--debug"] or ["--help"]
    names = _command_in(words)
    try:
        for name in names:
            check_name("command", name, commands())
        command = get_command(app_for(names))
        with command.make_context("undrop", words) as context:
            gc.enable()
            command.invoke(context)
        return 0
    except typer.Exit as end:
        return end.exit_code
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, " ".join(["undrop", *names]), debug=debug)
