"""The report as Markdown, with figures as files beside it."""

from __future__ import annotations

from collections.abc import Mapping

from undrop.lab.reproduce.claims import Verdict
from undrop.lab.reproduce.report.content import Content, Section, Table, number

__all__ = ["as_markdown", "markdown_table", "verdict_table"]


def as_markdown(content: Content, figures: Mapping[str, str]) -> str:
    """The whole report.

    Args:
        content: what it says.
        figures: the path of each experiment's figure, by its name.
    """
    parts = [f"# {content.title}", content.summary, "## Verdicts"]
    parts.append(markdown_table(verdict_table(content.verdicts)))
    for section in content.sections:
        parts += _section(section, figures.get(section.experiment.name))
    parts += ["## Settings", markdown_table(content.settings)]
    parts += ["## Made with", markdown_table(content.provenance)]
    return "\n\n".join(parts) + "\n"


def _section(section: Section, figure: str | None) -> list[str]:
    experiment = section.experiment
    parts = [f"## {experiment.title}", f"*{experiment.paper}* · `{experiment.name}`"]
    parts.append(experiment.about.strip())
    if figure is not None:
        parts.append(f"![{experiment.title}]({figure})")
    parts.append(markdown_table(section.table))
    parts += [f"The paper's numbers: {source}." for source in section.sources]
    parts.append(markdown_table(verdict_table(section.verdicts)))
    return parts


def verdict_table(verdicts: tuple[Verdict, ...]) -> Table:
    """Claims, verdicts, and the ratios they rest on."""
    rows = tuple(
        (
            _told(verdict),
            verdict.verdict,
            number(verdict.estimate, 3),
            "" if verdict.low is None else f"{number(verdict.low, 3)} – {number(verdict.high, 3)}",
            verdict.asked,
            number(verdict.paper, 3),
            str(verdict.seeds),
        )
        for verdict in verdicts
    )
    heads = ("claim", "verdict", "ratio", "95 % interval", "asked", "the paper's", "seeds")
    return Table(heads, rows, frozenset({2, 3, 4, 5, 6}))


def _told(verdict: Verdict) -> str:
    """The sentence, what its ratio is of, and why it may not hold."""
    lines = [verdict.claim, verdict.measured, verdict.reason and f"Likely: {verdict.reason}"]
    return "\n".join(line for line in lines if line)


def markdown_table(table: Table) -> str:
    """A table in pipes."""
    rule = ["---:" if i in table.numbers else "---" for i in range(len(table.heads))]
    lines = [table.heads, rule, *table.rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")
