"""A diagnosis as one HTML page that needs no other file and no network."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from undrop.diagnosis.report.plots import panels, svg

if TYPE_CHECKING:
    from undrop.diagnosis.report.result import Diagnosis

__all__ = ["write"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #ddd;
         vertical-align: top; }
th { border-bottom: 2px solid #444; font-weight: 600; }
td { white-space: nowrap; }
td:first-child { font-weight: 500; white-space: normal; min-width: 11rem; overflow-wrap: anywhere; }
.advice { background: #f3f3ee; border-left: 5px solid #444; padding: .8rem 1.2rem; }
.advice li { margin: .4rem 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; margin: .4rem 0; }
img { width: 100%; height: auto; border: 1px solid #ddd; }
footer { color: #555; font-size: .9rem; margin-top: 2.5rem; }
@media (max-width: 30rem) { .plots { grid-template-columns: 1fr; } }
"""


def write(diagnosis: Diagnosis, path: Path) -> None:
    """Write the page, whole or not at all."""
    from undrop.files import replacing

    text = "\n".join(_lines(diagnosis))
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    title = f"What dropout does in {escape(diagnosis.model)}"
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    yield '<section class="advice"><h2 style="margin-top:0">What to do</h2>\n<ul>'
    for sentence in diagnosis.advice or ["Nothing stands out."]:
        yield f"<li>{_code(sentence)}</li>"
    yield "</ul></section>"
    yield '<h2>In pictures</h2>\n<div class="plots">'
    for name, panel in panels(diagnosis).items():
        picture = base64.b64encode(svg(diagnosis, panel)).decode()
        yield (
            f"<figure><figcaption>{escape(name)}</figcaption>"
            f'<img alt="{escape(name)}; the figures are in the tables below" '
            f'src="data:image/svg+xml;base64,{picture}"></figure>'
        )
    yield "</div>"
    for name, rows in diagnosis.tables():
        yield from _table(name, rows)
    yield "<footer>"
    yield from (f"<p>{escape(note)}</p>" for note in diagnosis.notes)
    yield "</footer>\n</body>\n</html>"


def _table(title: str, rows: list[list[str]]) -> Iterator[str]:
    head, *body = rows
    yield f'<h2>{escape(title)}</h2>\n<div class="scroll"><table>\n<thead><tr>'
    yield "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    yield "</tr></thead>\n<tbody>"
    for row in body:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</tbody></table></div>"


def _code(sentence: str) -> str:
    """A sentence with what stands between backquotes set as code."""
    pieces = [escape(piece) for piece in sentence.split("`")]
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(pieces))
