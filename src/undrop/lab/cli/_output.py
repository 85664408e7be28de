"""What commands print, where they can write, and how they report errors."""

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
    """Refuse a path that can't be written, before any work is done.

    Args:
        files: paths to write to; None stands for an option that was not given.
        pictures: paths of figures, whose suffix must be a picture format.
        pages: paths of HTML pages with figures.

    Raises:
        RunError: if a file can't be written there.
        OptionError: if a suffix is not a picture format.
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
        files: paths, each with the function that writes it; None stands for an option not given.
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
        """Return the answer that lists names with a line about each."""
        rows = [{"name": name, "about": line} for name, line in names.items()]
        return cls(rows, Table(("name", "what it is"), list(names.items())))

    def show(self, *, json: bool) -> None:
        """Print the answer, write its files, and name each file on stderr."""
        if json:
            typer.echo(dumps(as_json(self._value), indent=2, ensure_ascii=False))
        else:
            for part in self._parts:
                _print(part)
        for path, write in self._files:
            if path is not None:
                write(path)
                typer.echo(f"written: {path}", err=True)


def _print(part: Table | str) -> None:
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
def working(what: str) -> Iterator[None]:
    """Show a line on stderr while a ``with`` block runs, if stderr is a terminal."""
    from undrop.report import Progress

    with Progress() as progress:
        progress.bar(f"{what} …")
        yield


BAD_INPUT = 2
"""The exit code of errors that the user can fix."""

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as in shells."""

_LABEL = "error:"

# The base class of typer's errors about a command line, which has no public name in every version.
_USAGE_ERROR: type[BaseException] = typer.BadParameter.__mro__[2]


def report_error(error: BaseException, command: str, *, debug: bool) -> int:
    """Print what went wrong on stderr and return the exit code; a bug is raised as it is.

    Args:
        error: what the command raised.
        command: the command, as in ``undrop train``.
        debug: whether to print the traceback too.
    """
    if isinstance(error, BrokenPipeError):  # the reader (`| head`) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, StoppedError):  # the user asked for it: not an error
        _say(str(error))
        return INTERRUPTED
    sentence = _sentence(error, command)
    if sentence is None:
        raise error
    if debug:
        traceback.print_exception(error)
    if sentence:
        _say(f"{_LABEL} {sentence}")
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else BAD_INPUT


def _say(text: str) -> None:
    """Print on stderr; on a terminal, wrap the text and color the label of an error red."""
    if sys.stderr.isatty():
        text = "\n".join(wrap(text, terminal_width(sys.stderr)))
        if text.startswith(_LABEL) and not os.environ.get("NO_COLOR"):
            text = typer.style(_LABEL, fg="red", bold=True) + text.removeprefix(_LABEL)
    typer.echo(text, err=True)


def _sentence(error: BaseException, command: str) -> str | None:
    """One sentence for the error; empty if there is nothing left to print, None for a bug."""
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
    message: str = error.format_message()  # type: ignore[attr-defined]
    if not message or type(error).__name__ == "NoArgsIsHelpError":
        return ""  # the help was printed instead
    if near := getattr(error, "possibilities", None):
        message = f"No such option {error.option_name}. Did you mean {' or '.join(near)}?"  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else command
    message = message.partition(", unable to parse")[0]  # the rest repeats the same in other words
    message = message.replace("Input should be", "it must be")
    stop = "" if message[-1] in ".?!" else "."
    return f"{message}{stop} See `{path} --help`."
