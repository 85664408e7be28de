"""The command line: ``undrop COMMAND``, one file per command.

A file of this folder whose name does not start with an underscore is a command: ``train.py`` is
``undrop train``. The first line of its docstring is its line in ``undrop --help``. It registers one
function, or one for each of its sub-commands::

    @COMMANDS.register("train")
    def train(...): ...

    @COMMANDS.register("data list")
    def list_corpora(...): ...

The arguments of the function are the options of the command, and its docstring is the help. An argument
whose type is a dataclass stands for the dataclass's fields: options that several commands share. A
function that returns an :class:`Answer` gets the option ``--json``.

``undrop --help`` imports no command, and ``undrop train`` imports ``train.py`` alone. A command file
imports torch inside its function, so that help, completion and the error for a wrong name are fast.

A command raises an :class:`~undrop.errors.UndropError` if something goes wrong; :func:`main` prints
it as one sentence on stderr and returns the exit code 2, with the traceback only under ``--debug``.
Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup
from typer.main import get_command

from undrop.lab.cli._names import check_name
from undrop.lab.cli._output import Answer, report_error
from undrop.registry import Registry

__all__ = ["COMMANDS", "GROUPS", "Answer", "app_for", "commands", "main"]

COMMANDS: Registry[str, Callable[..., Answer | None]] = Registry("command")
"""The functions behind the commands that have been imported."""

GROUPS = {
    "Train": ("demo", "train", "watch", "runs", "plot", "eval", "generate"),
    "Look into dropout": ("sites", "diagnose", "advise", "check", "bound"),
    "Compare and reproduce": ("bench", "reproduce", "report"),
    "List what is available": ("presets", "models", "objectives", "data"),
}
"""The headings of ``undrop --help``; a command under none of them comes last, under "More"."""

_COMPLETION = "_UNDROP_COMPLETE"
_COMPLETED_WORDS = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # set by bash, set by the other shells


def commands() -> dict[str, str]:
    """Return the name of every command with its line of help, in the order of ``--help``."""
    files = [file for folder in __path__ for file in Path(folder).glob("[!_]*.py")]
    found = {file.stem.replace("_", "-"): _first_line(file) for file in files}
    known = [name for names in GROUPS.values() for name in names if name in found]
    return {name: found[name] for name in [*known, *sorted(found.keys() - set(known))]}


def _first_line(file: Path) -> str:
    """The first line of a file's docstring, without parsing the file."""
    with file.open(encoding="utf-8") as text:
        return text.readline().strip().strip('"')


class _Grouped(TyperGroup):
    """A group of commands whose help has headings."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the headings of :data:`GROUPS`."""
        lines = commands()
        headed = {name for names in GROUPS.values() for name in names}
        groups = {**GROUPS, "More": tuple(name for name in lines if name not in headed)}
        width = max(map(len, lines))
        for heading, names in groups.items():
            rows = [(name.ljust(width), lines[name]) for name in names if name in lines]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def app_for(loaded: Sequence[str]) -> typer.Typer:
    """Return an app that imports only the ``loaded`` commands; the others have just a name and help."""
    app = typer.Typer(
        name="undrop",
        cls=_Grouped,
        no_args_is_help=True,
        rich_markup_mode=None,  # rich would take longer than everything else that --help does
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit them
    )
    app.callback()(_root)
    for name, line in commands().items():
        if name in loaded:
            _add(app, name)
        else:
            app.command(name, help=line)(lambda: None)
    return app


def _add(app: typer.Typer, name: str) -> None:
    """Import a command's file and add what it registers."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    for key, function in COMMANDS.items():
        first, _, second = key.partition(" ")
        if first == name:
            (group if second else app).command(second or name)(_command(function))
    if group.registered_commands:
        app.add_typer(group, name=name, help=module.__doc__)


def _command(function: Callable[..., Answer | None]) -> Callable[..., None]:
    """Return the function for typer: it turns dataclasses into options and prints the answer."""
    signature = inspect.signature(function, eval_str=True)
    kinds = {name: p.annotation for name, p in signature.parameters.items()}
    groups = {
        name: get_type_hints(kind, include_extras=True)
        for name, kind in kinds.items()
        if is_dataclass(kind)
    }
    flat: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        fields = [parameter]
        if name in groups:
            of_group = inspect.signature(kinds[name]).parameters.values()
            fields = [field.replace(annotation=groups[name][field.name]) for field in of_group]
        flat += [field.replace(kind=field.KEYWORD_ONLY) for field in fields]
    if signature.return_annotation not in (None, signature.empty):
        flat.append(_JSON)

    @wraps(function)
    def command(*, json: bool = False, **values: Any) -> None:
        for name, types in groups.items():
            values[name] = kinds[name](**{field: values.pop(field) for field in types})
        answer = function(**values)
        if answer is not None:
            answer.show(json=json)

    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=flat, return_annotation=None
    )
    return command


_JSON = inspect.Parameter(
    "json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")],
)


def _show_version(wanted: bool) -> None:
    if wanted:
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
    """The command in ``words``: the first without a dash, since undrop's own options take no values."""
    return [word for word in words if not word.startswith("-")][:1]


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` by default) and return its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    gc.disable()  # imports leave little garbage, and looking for it takes a quarter of their time
    try:
        return _main(words)
    finally:
        gc.enable()
        if args is None:  # the process ends, and the system frees the memory faster
            gc.freeze()


def _main(words: list[str]) -> int:
    if _COMPLETION in os.environ:
        typed = next((os.environ[name] for name in _COMPLETED_WORDS if name in os.environ), "")
        return int(app_for(_command_in(typed.split()[1:]))(words, prog_name="undrop") or 0)
    debug = "--debug" in words or os.environ.get("UNDROP_DEBUG", "0") not in ("", "0")
    words = [word for word in words if word != "--debug"] or ["--help"]
    try:
        _run(words)
        return 0
    except typer.Exit as end:
        return end.exit_code
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error, " ".join(["undrop", *_command_in(words)]), debug=debug)


def _run(words: list[str]) -> None:
    name = _command_in(words)
    check_name("command", name[0] if name else None, commands())
    command = get_command(app_for(name))
    with command.make_context("undrop", words) as context:
        gc.enable()
        command.invoke(context)
