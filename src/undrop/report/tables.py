"""Tables: one set of cells, shown in a terminal of any width, in Markdown or in HTML."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TextIO

_GAP = 2  # spaces between columns
_NARROWEST = 8  # the smallest width of a wrapped column of text
_UNLIMITED = 10_000
_BLANK = "\N{NO-BREAK SPACE}"
_IN_A_NUMBER = re.compile(r"(?<=[\d?%]) (?=[±%])|(?<=±) | (?==)|(?<==) ")  # "p = 1.2 ± 0.3", "5 %"
_IN_AN_ERROR = re.compile(r"(?<=[\d?]) (?=%)|(?<=±) ")  # the spaces in "± 0.3" and "5 %"


def terminal_width(stream: TextIO | None = None) -> int:
    """Return ``COLUMNS``, or the width of a stream's terminal; without either there is no limit.

    Args:
        stream: where the text goes; stdout if None.
    """
    if os.environ.get("COLUMNS", "").isdigit():
        return int(os.environ["COLUMNS"])
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns or _UNLIMITED
    except (OSError, ValueError, AttributeError):
        return _UNLIMITED


def unbroken(text: str) -> str:
    """Return a text in which a number, such as "1.2 ± 0.3" or "5 %", never breaks across lines."""
    return _IN_A_NUMBER.sub(_BLANK, text)


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of a text; those that are too long break at spaces, but not within a number.

    A word that is too long, such as a path, stays whole, so that people can copy it.

    >>> wrap("the ratio is 1.2 ± 0.3", 20)
    ['the ratio is', '1.2 ± 0.3']
    """
    lines = _wrapped(unbroken(text), width, whole_words=True)
    return [line.replace(_BLANK, " ") for line in lines]


@dataclass(frozen=True)
class Table:
    """Headings and cells of text.

    Attributes:
        headers: the column headers.
        rows: the cells; a cell may have several lines, of which all but the first are remarks.
        numbers: the headings of columns of numbers, which are aligned right and never broken.
        title: a line above the table.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    title: str = ""

    def text(self, width: int | None = None) -> str:
        """Return the table for a terminal.

        Text wraps within its column. If even that is too wide, each row becomes a block with one
        line per cell.

        Args:
            width: the available columns; None uses the width of the terminal.
        """
        head, body = self.lines(terminal_width() if width is None else width)
        return "\n".join([*([self.title] if self.title else []), *head, *body])

    def lines(self, width: int) -> tuple[list[str], list[str]]:
        """Return the lines of the headings (none if rows become blocks) and of the rows."""
        widths = self._widths(width)
        if widths is None:
            return [], [line for row in self.rows for line in self._block(row, width)][:-1]
        body = [line for row in self.rows for line in self._row(row, widths)]
        return list(self._row(self.headers, widths)), body

    def _widths(self, room: int) -> list[int] | None:
        """Return the width of every column, or None if the table does not fit."""
        cells = [
            max([_cells(row[i]) for row in self.rows] or [0]) for i in range(len(self.headers))
        ]
        widths = [max(cell, _cells(head)) for cell, head in zip(cells, self.headers, strict=True)]
        least = [
            max([cell, *map(_cells, head.split())])
            if head in self.numbers
            else max(min(w, _NARROWEST), 0, *(_longest_number(row[i]) for row in self.rows))
            for i, (cell, head, w) in enumerate(zip(cells, self.headers, widths, strict=True))
        ]
        excess = sum(widths) + _GAP * (len(widths) - 1) - room
        while excess > 0:
            spare = [now - low for now, low in zip(widths, least, strict=True)]
            if not any(spare):
                return None
            widest = max(range(len(widths)), key=lambda i: (spare[i] > 0, widths[i]))
            widths[widest] -= 1
            excess -= 1
        return widths

    def _row(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        columns = [_in_column(cell, w) for cell, w in zip(row, widths, strict=True)]
        for i in range(max(map(len, columns), default=0)):
            pieces = [
                _padded(column[i] if i < len(column) else "", width, right=head in self.numbers)
                for head, column, width in zip(self.headers, columns, widths, strict=True)
            ]
            yield (" " * _GAP).join(pieces).rstrip()

    def _block(self, row: Sequence[str], room: int) -> Iterator[str]:
        shown = [(head, cell) for head, cell in zip(self.headers, row, strict=True) if cell]
        label = min(max((_cells(head) for head, _ in shown), default=0), room // 2)
        for head, cell in shown:
            left = list(_wrapped(head, label))
            right = _in_column(cell, max(1, room - label - _GAP))
            for i in range(max(len(left), len(right))):
                key = _padded(left[i] if i < len(left) else "", label)
                yield (key + " " * _GAP + (right[i] if i < len(right) else "")).rstrip()
        yield ""

    def markdown(self) -> str:
        """Return the table in Markdown."""
        rule = ["---:" if head in self.numbers else "---" for head in self.headers]
        lines = [self.headers, rule, *self.rows]
        return "\n".join("| " + " | ".join(map(_in_pipes, line)) + " |" for line in lines)

    def html(self, kind: str = "", marks: dict[str, str] | None = None) -> str:
        """Return a ``<table>`` that scrolls if it is too wide.

        Args:
            kind: the CSS class; the rows of "cards" become cards on a narrow screen.
            marks: the CSS class of cells by their text.
        """
        headers = "".join(
            f'<th scope="col"{self._align(head)}>{escape(head)}</th>' for head in self.headers
        )
        rows = "\n".join(
            "<tr>"
            + "".join(
                f'<td{self._align(head)} data-head="{escape(head)}">{_marked(cell, marks or {})}</td>'
                for head, cell in zip(self.headers, row, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        title = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return (
            f'<div class="scroll"><table class="{kind}">{title}<thead><tr>{headers}</tr></thead>\n'
            f"<tbody>\n{rows}\n</tbody></table></div>"
        )

    def _align(self, head: str) -> str:
        return ' class="number"' if head in self.numbers else ""


def _in_column(cell: str, width: int) -> list[str]:
    """Return the lines of a cell; a number breaks only before its ±."""
    lines = _wrapped(_IN_AN_ERROR.sub(_BLANK, cell), width)
    return [line.replace(_BLANK, " ") for line in lines]


def _longest_number(cell: str) -> int:
    """Return the width of the widest figure in a cell, broken before its ±."""
    pieces = _IN_AN_ERROR.sub(_BLANK, cell).replace("\n", " ").split(" ")
    return max((_cells(piece) for piece in pieces if _BLANK in piece), default=0)


def _cells(text: str) -> int:
    """Return the width of a text in a terminal; the widest line counts."""
    return max(sum(map(_width, line)) for line in text.split("\n"))


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _padded(text: str, width: int, *, right: bool = False) -> str:
    space = " " * (width - _cells(text))
    return space + text if right else text + space


def _wrapped(text: str, width: int, *, whole_words: bool = False) -> Iterator[str]:
    """Break a text at spaces; a word that is too wide breaks after punctuation such as a slash."""
    for paragraph in text.split("\n"):
        if _cells(paragraph) <= width:
            yield paragraph
            continue
        line = ""
        for word in paragraph.split(" "):
            joined = f"{line} {word}" if line else word
            if _cells(joined) <= width:
                line = joined
                continue
            if line:
                yield line
            while not whole_words and _cells(word) > width and len(word) > 1:
                most = max(1, width // max(map(_width, word)))
                size = max(word.rfind(mark, 0, most) for mark in "/-_.:") + 1 or most
                yield word[:size]
                word = word[size:]
            line = word
        yield line


def _in_pipes(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")


def _marked(text: str, marks: dict[str, str]) -> str:
    first, *rest = (escape(unbroken(line)) for line in text.split("\n"))
    shown = f'<span class="{marks[text]}">{first}</span>' if text in marks else first
    return shown + "".join(f'<br><span class="soft">{line}</span>' for line in rest)
