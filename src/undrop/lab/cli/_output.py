"""What commands print, where they may write, and how errors look: one sentence, an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from undrop.errors import StoppedError, UndropError
from undrop.report import Table, as_json, terminal_width, wrap


def check_outputs(
    *, files: Iterable[Path | None] = (), pictures: Iterable[Path | None] = ()
) -> None:
    """Refuse a path that can't be written, before any work is done.

    Args:
        files: paths to write to; None is one that was not asked for.
        pictures: paths of figures, whose suffix must name a kind of picture.

    Raises:
        RunError: if a file can't be written there.
        OptionError: if a suffix names no kind of picture.
        MissingExtraError: if there are pictures and matplotlib is not installed.
    """
    from undrop.files import check_writable
    from undrop.report.figures import check_picture

    for picture in pictures:
        if picture is not None:
            check_picture(picture)
            check_writable(picture)
    for file in files:
        if file is not None:
            check_writable(file)


def write_outputs(*outputs: tuple[Path | None, Callable[[Path], None]]) -> None:
    """Write the files that were asked for, and name each on stderr.

    Args:
        outputs: a path, None for one that was not asked for, and what writes it.
    """
    for path, write in outputs:
        if path is not None:
            write(path)
            typer.echo(f"written: {path}", err=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a line on stderr while a ``with`` block runs, if stderr is a terminal."""
    from undrop.report import Progress

    with Progress() as progress:
        progress.bar(f"{what} …")
        yield


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    typer.echo(json.dumps(as_json(value), indent=2, ensure_ascii=False))


def print_text(text: str) -> None:
    """Print prose on stdout, broken between words on a terminal."""
    typer.echo("\n".join(wrap(text, terminal_width())))


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    numbers: Collection[str] = (),
) -> None:
    """Print a table that fits the terminal on stdout.

    Args:
        heads: the headings.
        rows: the cells, as plain text.
        title: a line above the table.
        numbers: the headings of columns of figures, which are aligned right and never broken.
    """
    head, body = Table(heads, rows, numbers).lines(terminal_width())
    for line in [*([title] if title else []), *head]:
        typer.secho(line, bold=True)
    for line in body:
        typer.echo(line)


def print_names(names: Mapping[str, str], *, json: bool) -> None:
    """Print names with a line about each."""
    if json:
        print_json([{"name": name, "about": line} for name, line in names.items()])
    else:
        print_table(["name", "what it is"], list(names.items()))


BAD_INPUT = 2
"""The exit code for everything that the user can fix."""

INTERRUPTED = 130
"""The exit code after Ctrl-C by the convention of shells: 128 + SIGINT."""

_LABEL = "error:"

# The base class of typer's errors about a command line, which has no public name in every version.
_USAGE_ERROR: type[BaseException] = typer.BadParameter.__mro__[2]


def report_error(error: BaseException, command: str, *, debug: bool) -> int:
    """Print what went wrong on stderr and return the exit code; a bug is raised again.

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
    """Print on stderr, broken between words on a terminal, where the label of an error is red."""
    if sys.stderr.isatty():
        text = "\n".join(wrap(text, terminal_width(sys.stderr)))
        if text.startswith(_LABEL) and not os.environ.get("NO_COLOR"):
            text = typer.style(_LABEL, fg="red", bold=True) + text.removeprefix(_LABEL)
    typer.echo(text, err=True)


def _sentence(error: BaseException, command: str) -> str | None:
    """One sentence for the error; empty if it has been printed already, None for a bug."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted."
    if isinstance(error, _USAGE_ERROR):
        return _usage_sentence(error, command)
    if isinstance(error, UndropError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" {error.filename}" if error.filename is not None else ""
        return f"the system refused{where}: {error.strerror.lower()}."
    return None


def _usage_sentence(error: BaseException, command: str) -> str:
    message: str = error.format_message()  # type: ignore[attr-defined]
    if not message or type(error).__name__ == "NoArgsIsHelpError":
        return ""  # the help was printed instead
    if near := getattr(error, "possibilities", None):
        message = f"No such option {error.option_name}. Did you mean {' or '.join(near)}?"  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else command
    message = message.replace("Input should be", "it must be").partition(", unable to parse")[
        0
    ]  # it repeats what it says before
    stop = "" if message[-1] in ".?!" else "."
    return f"{message}{stop} See `{path} --help`."
