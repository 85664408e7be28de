"""Print the answers and the errors of commands, and check the paths that they write to."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Any

import typer

from undrop.errors import StoppedError, UndropError
from undrop.report import Table, as_json, terminal_width, wrap


def check_outputs(
    *,
    files: Sequence[Path | None] = (),
    pictures: Sequence[Path | None] = (),
    pages: Sequence[Path | None] = (),
) -> None:
    """Refuse a path that can't be written, before any work is done; skip None.

    Args:
        files: paths of files without figures.
        pictures: paths of figures, whose suffix must be a picture format.
        pages: paths of HTML pages with figures.

    Raises:
        RunError: if a path can't be written.
        OptionError: if the suffix of a figure is not a picture format.
        MissingExtraError: if there are pictures or pages and matplotlib is not installed.
    """
    from undrop.files import check_writable
    from undrop.report.figures import check_drawable, check_picture

    for picture in filter(None, pictures):
        check_picture(picture)
    for path in filter(None, [*pictures, *pages, *files]):
        check_writable(path)
    if any(pages):
        check_drawable()


class Answer:
    """What a command prints on stdout, and the files that it then writes.

    A command that returns an answer has the option ``--json``.

    Args:
        value: what ``--json`` prints.
        parts: the tables and texts that are printed without ``--json``.
        files: each path with the function that writes it; a path that is None is skipped.
    """

    def __init__(
        self,
        value: Any,
        *parts: Table | str,
        files: Iterable[tuple[Path | None, Callable[[Path], None]]] = (),
    ) -> None:
        self._value, self._parts, self._files = value, parts, files

    @classmethod
    def names(cls, names: Mapping[str, str]) -> Answer:
        """Return the answer that lists names and the line about each."""
        rows = [{"name": name, "about": line} for name, line in names.items()]
        return cls(rows, Table(("name", "what it is"), list(names.items())))

    def show(self, *, json: bool) -> None:
        """Print the answer, write its files, and name each file on stderr."""
        if json:
            typer.echo(dumps(as_json(self._value), indent=2, ensure_ascii=False))
        else:
            for part in self._parts:
                _print_part(part)
        for path, write in self._files:
            if path is not None:
                write(path)
                typer.echo(f"written: {path}", err=True)


def _print_part(part: Table | str) -> None:
    """Print a text, wrapped to the terminal's width, or a table with bold headings."""
    if isinstance(part, str):
        typer.echo("\n".join(wrap(part, terminal_width())))
        return
    head, body = part.lines(terminal_width())
    for line in [*([part.title] if part.title else []), *head]:
        typer.secho(line, bold=True)
    for line in body:
        typer.echo(line)


@contextmanager
def status_line(text: str) -> Iterator[None]:
    """Show a line on stderr while a ``with`` block runs, if stderr is a terminal."""
    from undrop.report import Progress

    with Progress() as progress:
        progress.bar(f"{text} …")
        yield


BAD_INPUT = 2
"""The exit code of errors that the user can fix."""

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as in shells."""

_LABEL = "error:"

# The base class of typer's errors about a command line. It has no public name in some versions.
_USAGE_ERROR: type[BaseException] = typer.BadParameter.__mro__[2]


def report_error(error: BaseException, command: str, *, debug: bool) -> int:
    """Print an error as one sentence on stderr, and return the exit code.

    An exception that undrop does not expect is a bug. It is raised again, with its traceback.

    Args:
        error: the exception that the command raised.
        command: the command, as in ``undrop train``.
        debug: whether to print the traceback of an expected error too.
    """
    if isinstance(error, BrokenPipeError):  # the program that reads the output (`| head`) has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, StoppedError):  # not an error: the user stopped the run
        _print_to_stderr(str(error))
        return INTERRUPTED
    sentence = _error_sentence(error, command)
    if sentence is None:
        raise error
    if debug:
        traceback.print_exception(error)
    if sentence:
        _print_to_stderr(f"{_LABEL} {sentence}")
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else BAD_INPUT


def _print_to_stderr(text: str) -> None:
    """Print a text; on a terminal, wrap it, and print the label of an error in red."""
    if sys.stderr.isatty():
        text = "\n".join(wrap(text, terminal_width(sys.stderr)))
        if text.startswith(_LABEL) and not os.environ.get("NO_COLOR"):
            text = typer.style(_LABEL, fg="red", bold=True) + text.removeprefix(_LABEL)
    typer.echo(text, err=True)


def _error_sentence(error: BaseException, command: str) -> str | None:
    """Return one sentence about the error; empty if there is nothing to print, None for a bug."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted."
    if isinstance(error, _USAGE_ERROR):
        return _usage_sentence(error, command)
    if isinstance(error, UndropError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" for {error.filename}" if error.filename is not None else ""
        return f"the operating system reports an error{where}: {error.strerror.lower()}."
    return None


def _usage_sentence(error: BaseException, command: str) -> str:
    """Return typer's message about the command line, with the command that shows the help."""
    message: str = error.format_message()  # type: ignore[attr-defined]
    if not message or type(error).__name__ == "NoArgsIsHelpError":
        return ""  # typer has printed the help instead
    if near := getattr(error, "possibilities", None):
        message = f"No such option {error.option_name}. Did you mean {' or '.join(near)}?"  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else command
    message = message.partition(", unable to parse")[0]  # the rest repeats the same in other words
    message = message.replace("Input should be", "it must be")
    stop = "" if message[-1] in ".?!" else "."
    return f"{message}{stop} See `{path} --help`."
