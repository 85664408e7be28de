"""HTML pages and fragments that need no other file and no network."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from html import escape as escape
from importlib import resources
from pathlib import Path

from undrop.files import replacing
from undrop.report.tables import keep_numbers_whole


@cache
def _style() -> str:
    return (resources.files("undrop.report") / "style.css").read_text(encoding="utf-8")


def page(title: str, *body: str) -> str:
    """Return a page: the title as a heading, then the elements of ``body``."""
    content = "\n".join(element for element in body if element)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\nbody {{ margin: 0; }}\n{_style()}</style>\n"
        f'</head>\n<body>\n<main class="undrop">\n<h1>{escape(title)}</h1>\n{content}\n'
        "</main>\n</body>\n</html>\n"
    )


def fragment(*body: str) -> str:
    """Return elements for ``_repr_html_``, with a style that does not affect the rest of a notebook."""
    content = "\n".join(element for element in body if element)
    return f'<div class="undrop"><style>{_style()}</style>\n{content}\n</div>'


def heading(text: str, *, anchor: str = "", level: int = 2) -> str:
    """Return a heading; a link to ``#anchor`` leads to it."""
    attribute = f' id="{escape(anchor)}"' if anchor else ""
    return f"<h{level}{attribute}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of the CSS class ``kind``; words in backquotes become code."""
    css_class = f' class="{kind}"' if kind else ""
    return f"<p{css_class}>{_with_code(text)}</p>"


def bullets(sentences: Iterable[str]) -> str:
    """Return a list; words in backquotes become code."""
    return "<ul>" + "".join(f"<li>{_with_code(sentence)}</li>" for sentence in sentences) + "</ul>"


def callout(title: str, *body: str) -> str:
    """Return a box that stands out, with a title."""
    return f'<section class="callout"><h2>{escape(title)}</h2>\n' + "\n".join(body) + "</section>"


def figure(picture: str, caption: str = "") -> str:
    """Return an ``<svg>`` element as a figure, with a caption above it."""
    figcaption = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{figcaption}{picture}</figure>"


def write(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _with_code(text: str) -> str:
    pieces = [escape(piece) for piece in keep_numbers_whole(text).split("`")]
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(pieces))
