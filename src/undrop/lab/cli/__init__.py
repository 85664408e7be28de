"""The command line: ``undrop COMMAND``, one file per command.

A file of this folder whose name does not start with an underscore *is* a command: ``train.py`` is
``undrop train``. To add one, add the file, with

- a docstring whose first line is the command's line in ``undrop --help``;
- ``register(app)``, which hands the command to the typer app it is given, under the file's name::

      def register(app: typer.Typer) -> None:
          app.command("train")(train)                       # one command
          app.add_typer(data, name="data", help=__doc__)    # or a command with sub-commands

and give it its place in :data:`ORDER`. ``--help`` reads the docstrings without importing the files,
and ``undrop train`` imports ``train.py`` alone: no command pays for another one's libraries.

A command raises what went wrong as an :class:`~undrop.errors.UndropError`; :func:`main` makes it
one sentence on stderr and the exit code 2, with the traceback only under ``--debug``. A command
that ends otherwise raises ``typer.Exit(code)``. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.main import get_command

from undrop.lab.cli import _errors

__all__ = ["ORDER", "app_for", "commands", "main"]

ORDER = (
    *("demo", "data", "train", "watch", "runs", "plot", "eval", "generate"),
    *("sites", "check", "diagnose", "bound"),
    *("bench", "reproduce", "report"),
)
"""The order of the commands in ``undrop --help``."""

_COMPLETION = "_UNDROP_COMPLETE"


def commands() -> dict[str, str]:
    """The name of every command and its one line of help, read off the files, in order."""
    found = {
        module.name.replace("_", "-"): _first_line(Path(__path__[0]) / f"{module.name}.py")
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_")
    }
    places = {name: place for place, name in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda item: (places.get(item[0], len(ORDER)), item[0])))


def _first_line(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def app_for(loaded: Sequence[str]) -> typer.Typer:
    """The app in which the ``loaded`` commands are real and all others only names with a help."""
    app = typer.Typer(
        name="undrop",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit them
    )
    app.callback()(_root)
    for name, line in commands().items():
        if name in loaded:
            importlib.import_module(f"{__name__}.{name.replace('-', '_')}").register(app)
        else:
            app.command(name, help=line)(lambda: None)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"undrop {version('undrop')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; anywhere, or UNDROP_DEBUG=1.")
    ] = False,
) -> None:
    """Takes dropout apart: measure what it does to a model, and train without it."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` unless given) and return its exit code."""
    words = list(sys.argv[1:] if args is None else args)
    if _COMPLETION in os.environ:
        return int(app_for(list(commands()))(words, prog_name="undrop") or 0)
    debug = "--debug" in words or os.environ.get("UNDROP_DEBUG", "0") not in ("", "0")
    words = [word for word in words if word != "--debug"] or ["--help"]
    # Options of the root take no values, so the first bare word is the command.
    command = get_command(app_for([word for word in words if not word.startswith("-")][:1]))
    try:
        with command.make_context("undrop", words) as context:
            command.invoke(context)
        return 0
    except typer.Exit as end:
        return end.exit_code
    except (Exception, KeyboardInterrupt) as error:
        return _errors.report(error, debug=debug)
