"""A diagnosis as one HTML page, or as part of a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from undrop.diagnosis.report.plots import panels, picture
from undrop.report import html

if TYPE_CHECKING:
    from undrop.diagnosis.report.result import Diagnosis


def write(diagnosis: Diagnosis, path: Path) -> None:
    """Write the page, whole or not at all."""
    pictures = [
        html.figure(picture(diagnosis, title, panel), title)
        for title, panel in panels(diagnosis).items()
    ]
    text = html.page(
        f"What dropout does in {diagnosis.model}",
        *_summary(diagnosis),
        html.heading("In pictures"),
        '<div class="figures">' + "\n".join(pictures) + "</div>",
        *_tables(diagnosis),
        html.heading("How it was measured"),
        html.bullets(diagnosis.notes),
        diagnosis.glossary().html(),
        diagnosis.origin().html(),
    )
    html.write(path, text)


def notebook(diagnosis: Diagnosis) -> str:
    """The conclusion and the tables for a notebook's output cell."""
    return html.fragment(*_summary(diagnosis), *_tables(diagnosis))


def _summary(diagnosis: Diagnosis) -> list[str]:
    return [
        html.callout("Conclusion", html.paragraph(diagnosis.conclusion)),
        html.heading("What to do"),
        html.bullets(diagnosis.advice),
    ]


def _tables(diagnosis: Diagnosis) -> list[str]:
    """The rows of wide tables become cards on a narrow screen."""
    return [table.html("cards" if len(table.heads) > 3 else "") for table in diagnosis.tables()]
