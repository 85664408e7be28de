"""The report as one HTML page, and as Markdown with figures beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from undrop.lab.reproduce.claims import DOES_NOT_HOLD, HOLDS, NOT_RUN, UNDECIDED, Verdict
from undrop.lab.reproduce.report.content import Content, Section, number
from undrop.report import Table, html

_MARKS = {HOLDS: "good", DOES_NOT_HOLD: "bad", UNDECIDED: "open", NOT_RUN: "open"}
_HOW = (
    "A ratio is the geometric mean over seeds, paired by seed, with Student's interval. A claim holds "
    "if the whole interval lies in the range that the claim asks for. For an undecided claim, the last "
    "column is the number of seeds that would decide it with a probability of 80 %, if the measured "
    "ratio and spread are the true ones."
)


def as_html(content: Content, figures: Mapping[str, str]) -> str:
    """Return the report as a page that needs no other file.

    Args:
        content: what the report says.
        figures: the ``<svg>`` element of each experiment's figure, by the experiment's name.
    """
    links = "".join(
        f'<a href="#{s.experiment.name}">{html.escape(s.experiment.title)}</a>'
        for s in content.sections
    )
    return html.page(
        content.title,
        html.paragraph(content.summary, "lead"),
        f"<nav>{links}</nav>",
        html.heading("Verdicts"),
        html.paragraph(_HOW),
        _verdicts(content.verdicts).html("cards", _MARKS),
        *(_chapter(section, figures.get(section.experiment.name)) for section in content.sections),
        html.heading("Settings"),
        content.settings.html(),
        html.heading("Made with"),
        content.provenance.html(),
    )


def _chapter(section: Section, figure: str | None) -> str:
    experiment = section.experiment
    parts = [
        html.heading(experiment.title, anchor=experiment.name),
        html.paragraph(f"{experiment.paper} · `{experiment.name}`", "soft"),
        html.paragraph(experiment.about.strip()),
        "" if figure is None else html.figure(figure),
        section.table.html(),
        *(html.paragraph(f"The paper’s numbers: {s}.", "soft") for s in section.sources),
        _verdicts(section.verdicts).html("cards", _MARKS),
    ]
    return '<section class="chapter">\n' + "\n".join(filter(None, parts)) + "\n</section>"


def as_markdown(content: Content, figures: Mapping[str, str]) -> str:
    """Return the report as Markdown.

    Args:
        content: what the report says.
        figures: the path of each experiment's figure, by the experiment's name.
    """
    parts = [f"# {content.title}", content.summary, "## Verdicts", _HOW]
    parts.append(_verdicts(content.verdicts).markdown())
    for section in content.sections:
        experiment = section.experiment
        parts += [f"## {experiment.title}", f"*{experiment.paper}* · `{experiment.name}`"]
        parts.append(experiment.about.strip())
        if experiment.name in figures:
            parts.append(f"![{experiment.title}]({figures[experiment.name]})")
        parts.append(section.table.markdown())
        parts += [f"The paper's numbers: {source}." for source in section.sources]
        parts.append(_verdicts(section.verdicts).markdown())
    parts += ["## Settings", content.settings.markdown()]
    parts += ["## Made with", content.provenance.markdown()]
    return "\n\n".join(parts) + "\n"


def _verdicts(verdicts: Sequence[Verdict]) -> Table:
    heads = (
        "claim",
        "verdict",
        "ratio",
        "95 % interval",
        "asked",
        "the paper's",
        "seeds",
        "to decide",
    )
    rows = [
        (
            _claim(verdict),
            verdict.verdict,
            number(verdict.estimate, 3),
            "" if verdict.low is None else f"{number(verdict.low, 3)} – {number(verdict.high, 3)}",
            verdict.asked,
            number(verdict.paper, 3),
            str(verdict.seeds),
            "" if verdict.needed is None else str(verdict.needed),
        )
        for verdict in verdicts
    ]
    return Table(heads, rows, numbers=heads[2:])


def _claim(verdict: Verdict) -> str:
    """The sentence, its ratio in words, and why it may not hold."""
    lines = [verdict.claim, verdict.measured, verdict.reason and f"Likely: {verdict.reason}"]
    return "\n".join(line for line in lines if line)
