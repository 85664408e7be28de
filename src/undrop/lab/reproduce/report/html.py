"""The report as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources

from undrop.lab.reproduce.claims import DOES_NOT_HOLD, HOLDS, UNDECIDED
from undrop.lab.reproduce.report.content import Content, Section, Table
from undrop.lab.reproduce.report.markdown import verdict_table

__all__ = ["as_html"]

_CLASSES = {HOLDS: "holds", DOES_NOT_HOLD: "not", UNDECIDED: "undecided"}


def as_html(content: Content, figures: Mapping[str, str]) -> str:
    """The whole report.

    Args:
        content: what it says.
        figures: each experiment's figure as an ``<svg>`` element, by its name.
    """
    style = (resources.files("undrop.lab.reproduce.report") / "style.css").read_text(
        encoding="utf-8"
    )
    links = "".join(
        f'<a href="#{escape(s.experiment.name)}">{escape(s.experiment.title)}</a>'
        for s in content.sections
    )
    body = [
        f"<h1>{escape(content.title)}</h1>",
        f'<p class="lead">{escape(content.summary)}</p>',
        f"<nav>{links}</nav>",
        "<h2>Verdicts</h2>",
        "<p>A ratio is the geometric mean over seeds, paired by seed, with its bootstrap interval; a "
        "claim holds if the whole interval lies where it is asked to.</p>",
        _table(verdict_table(content.verdicts), "verdicts"),
        *(_section(section, figures.get(section.experiment.name)) for section in content.sections),
        "<h2>Settings</h2>",
        _table(content.settings),
        "<h2>Made with</h2>",
        _table(content.provenance),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(content.title)}</title>\n<style>\n{style}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def _section(section: Section, figure: str | None) -> str:
    experiment = section.experiment
    parts = [
        f'<h2 id="{escape(experiment.name)}">{escape(experiment.title)}</h2>',
        f'<p class="from">{escape(experiment.paper)} · <code>{escape(experiment.name)}</code></p>',
        f"<p>{escape(experiment.about.strip())}</p>",
        "" if figure is None else f"<figure>{figure}</figure>",
        _table(section.table),
        *(f'<p class="sources">The paper’s numbers: {escape(s)}.</p>' for s in section.sources),
        _table(verdict_table(section.verdicts), "verdicts"),
    ]
    return "<section>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def _table(table: Table, kind: str = "") -> str:
    heads = "".join(
        f'<th{_number(table, i)} scope="col">{escape(head)}</th>'
        for i, head in enumerate(table.heads)
    )
    rows = "".join(
        "<tr>" + "".join(_cell(table, i, cell) for i, cell in enumerate(row)) + "</tr>\n"
        for row in table.rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>"
    )


def _cell(table: Table, column: int, text: str) -> str:
    """A cell; what follows its first line is set small."""
    first, *rest = (escape(line) for line in text.split("\n"))
    shown = f'<span class="{_CLASSES[text]}">{first}</span>' if text in _CLASSES else first
    shown += "".join(f'<br><span class="soft">{line}</span>' for line in rest)
    return f'<td{_number(table, column)} data-head="{escape(table.heads[column])}">{shown}</td>'


def _number(table: Table, column: int) -> str:
    return ' class="number"' if column in table.numbers else ""
