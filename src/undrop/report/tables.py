"""Tables of text, for a terminal of any width, in Markdown or in HTML."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from typing import TextIO

_GAP = 2  # spaces between columns
_MIN_TEXT_WIDTH = 8  # a column of text is never narrower, unless its text is
_UNLIMITED = 10_000
_NO_BREAK = "\N{NO-BREAK SPACE}"
_UNBREAKABLE = re.compile(r"(?<=[\d?%]) (?=[±%])|(?<=±) | (?==)|(?<==) ")
"""Spaces where a text never breaks: those in "p = 1.2 ± 0.3" and "5 %"."""
_UNBREAKABLE_IN_CELL = re.compile(r"(?<=[\d?]) (?=%)|(?<=±) ")
"""Spaces where a cell never breaks: those in "± 0.3" and "5 %"."""


def terminal_width(stream: TextIO | None = None) -> int:
    """Return ``COLUMNS``, else the width of the stream's terminal, else a very large number.

    Args:
        stream: the stream to write to; stdout if None.
    """
    if os.environ.get("COLUMNS", "").isdigit():
        return int(os.environ["COLUMNS"])
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns or _UNLIMITED
    except (OSError, ValueError, AttributeError):
        return _UNLIMITED


def keep_numbers_whole(text: str) -> str:
    """Put no-break spaces into numbers such as "1.2 ± 0.3" or "5 %": a line break never splits them."""
    return _UNBREAKABLE.sub(_NO_BREAK, text)


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of a text, wrapped at spaces, but not within a number.

    A word that is too long, such as a path, stays whole, so that people can copy it.

    >>> wrap("the ratio is 1.2 ± 0.3", 20)
    ['the ratio is', '1.2 ± 0.3']
    """
    lines = _wrap_lines(keep_numbers_whole(text), width, whole_words=True)
    return [line.replace(_NO_BREAK, " ") for line in lines]


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        headers: the headers of the columns.
        rows: the cells of each row. A cell may have several lines; HTML shows all but the first in gray.
        numbers: the headers of columns of numbers, which are right-aligned and never wrap.
        title: a line above the table.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    title: str = ""

    def text(self, width: int | None = None) -> str:
        """Return the table for a terminal.

        Text wraps within its column. If the table is still too wide, each row becomes a block with one
        line per cell.

        Args:
            width: the largest width of a line; None uses the width of the terminal.
        """
        header_lines, body = self.lines(terminal_width() if width is None else width)
        title = [self.title] if self.title else []
        return "\n".join([*title, *header_lines, *body])

    def lines(self, width: int) -> tuple[list[str], list[str]]:
        """Return the lines of the headers (none if rows become blocks) and of the rows."""
        widths = self._column_widths(width)
        if widths is None:
            return [], [line for row in self.rows for line in self._block_lines(row, width)][:-1]
        body = [line for row in self.rows for line in self._row_lines(row, widths)]
        return list(self._row_lines(self.headers, widths)), body

    def _column_widths(self, limit: int) -> list[int] | None:
        """Return the widths of the columns, or None if the table can't be as narrow as ``limit``."""
        widths, least = [], []
        for i, header in enumerate(self.headers):
            cells = [row[i] for row in self.rows]
            content = max(map(_text_width, cells), default=0)
            width = max(content, _text_width(header))
            widths.append(width)
            if header in self.numbers:
                least.append(max([content, *map(_text_width, header.split())]))
            else:
                least.append(max([min(width, _MIN_TEXT_WIDTH), *map(_longest_number, cells)]))
        excess = sum(widths) + _GAP * (len(widths) - 1) - limit
        for _ in range(excess):
            shrinkable = [i for i, width in enumerate(widths) if width > least[i]]
            if not shrinkable:
                return None
            widths[max(shrinkable, key=lambda i: widths[i])] -= 1
        return widths

    def _row_lines(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        columns = [_wrap_cell(cell, w) for cell, w in zip(row, widths, strict=True)]
        right = [header in self.numbers for header in self.headers]
        for line in zip_longest(*columns, fillvalue=""):
            yield (" " * _GAP).join(map(_pad, line, widths, right)).rstrip()

    def _block_lines(self, row: Sequence[str], limit: int) -> Iterator[str]:
        pairs = [(header, cell) for header, cell in zip(self.headers, row, strict=True) if cell]
        label = min(max((_text_width(header) for header, _ in pairs), default=0), limit // 2)
        for header, cell in pairs:
            left = _wrap_lines(header, label)
            right = _wrap_cell(cell, max(1, limit - label - _GAP))
            for key, text in zip_longest(left, right, fillvalue=""):
                yield (_pad(key, label) + " " * _GAP + text).rstrip()
        yield ""

    def markdown(self) -> str:
        """Return the table in Markdown."""
        alignment = ["---:" if header in self.numbers else "---" for header in self.headers]
        lines = [self.headers, alignment, *self.rows]
        return "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)

    def html(self, kind: str = "", marks: dict[str, str] | None = None) -> str:
        """Return a ``<table>`` that scrolls if it is too wide.

        Args:
            kind: the CSS class; with "cards", each row becomes a card on a narrow screen.
            marks: the CSS class of a cell, by the text of the cell.
        """
        names = [escape(header) for header in self.headers]
        classes = [' class="number"' if header in self.numbers else "" for header in self.headers]
        heads = zip(classes, names, strict=True)
        headers = "".join(f'<th scope="col"{css}>{name}</th>' for css, name in heads)
        rows = "\n".join(
            "<tr>"
            + "".join(
                f'<td{css} data-head="{name}">{_html_cell(cell, marks or {})}</td>'
                for css, name, cell in zip(classes, names, row, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        title = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return (
            f'<div class="scroll"><table class="{kind}">{title}<thead><tr>{headers}</tr></thead>\n'
            f"<tbody>\n{rows}\n</tbody></table></div>"
        )


def _wrap_cell(cell: str, width: int) -> list[str]:
    """Return the lines of a cell; a number breaks only before its ±."""
    lines = _wrap_lines(_UNBREAKABLE_IN_CELL.sub(_NO_BREAK, cell), width)
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _longest_number(cell: str) -> int:
    """Return the width of the widest number in a cell, if numbers break before their ±."""
    pieces = _UNBREAKABLE_IN_CELL.sub(_NO_BREAK, cell).replace("\n", " ").split(" ")
    return max((_text_width(piece) for piece in pieces if _NO_BREAK in piece), default=0)


def _text_width(text: str) -> int:
    """Return the width of the widest line of a text in a terminal."""
    return max(sum(map(_character_width, line)) for line in text.split("\n"))


def _character_width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _pad(text: str, width: int, right: bool = False) -> str:
    space = " " * (width - _text_width(text))
    return space + text if right else text + space


def _wrap_lines(text: str, width: int, *, whole_words: bool = False) -> Iterator[str]:
    """Break a text at spaces; a word that is too wide breaks after punctuation such as a slash."""
    for paragraph in text.split("\n"):
        if _text_width(paragraph) <= width:
            yield paragraph
            continue
        line = ""
        for word in paragraph.split(" "):
            joined = f"{line} {word}" if line else word
            if _text_width(joined) <= width:
                line = joined
                continue
            if line:
                yield line
            while not whole_words and _text_width(word) > width and len(word) > 1:
                most = max(1, width // max(map(_character_width, word)))
                size = max(word.rfind(mark, 0, most) for mark in "/-_.:") + 1 or most
                yield word[:size]
                word = word[size:]
            line = word
        yield line


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")


def _html_cell(text: str, marks: dict[str, str]) -> str:
    first, *rest = (escape(keep_numbers_whole(line)) for line in text.split("\n"))
    if text in marks:
        first = f'<span class="{marks[text]}">{first}</span>'
    return first + "".join(f'<br><span class="soft">{line}</span>' for line in rest)
