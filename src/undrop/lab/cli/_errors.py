"""How errors look in a shell: one sentence, an exit code, no traceback."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from undrop.errors import StoppedError, UndropError
from undrop.report import terminal_width, wrap

BAD_INPUT = 2
"""The exit code for everything that the user can fix."""

INTERRUPTED = 130
"""The exit code after Ctrl-C by the convention of shells: 128 + SIGINT."""

_LABEL = "error:"

# The base class of typer's errors about a command line, which has no public name in every version.
_USAGE_ERROR: type[BaseException] = typer.BadParameter.__mro__[2]


def report(error: BaseException, command: str, *, debug: bool) -> int:
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
