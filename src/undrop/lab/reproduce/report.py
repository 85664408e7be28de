"""The report: figures, tables and verdicts as one HTML page, as Markdown, and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from undrop.errors import RunError
from undrop.files import naming_disk_errors, write_json
from undrop.lab.reproduce import tables
from undrop.lab.reproduce.figures import draw
from undrop.lab.reproduce.records import Record, Records
from undrop.lab.reproduce.results import (
    DOES_NOT_HOLD,
    HOLDS,
    MEASURES,
    NOT_RUN,
    UNDECIDED,
    Interval,
    Results,
    Verdict,
    verdicts,
)
from undrop.lab.reproduce.worklist import Worklist
from undrop.report import Table, as_json, html
from undrop.report.figures import check_drawable, save, svg


@dataclass(frozen=True)
class Row:
    """One method on one setting."""

    cell: str  # setting:method
    setting: str
    method: str
    label: str
    interval: Interval | None
    paper: tables.PaperNumber | None
    cost: float | None
    choice: str


@dataclass(frozen=True)
class Section:
    """One experiment."""

    experiment: tables.Experiment
    rows: tuple[Row, ...]
    table: Table
    verdicts: tuple[Verdict, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class ReportContent:
    """A whole report."""

    title: str
    summary: str
    sections: tuple[Section, ...]
    verdicts: tuple[Verdict, ...]
    settings: Table
    provenance: Table


def report_content(results: Results, scale: str) -> ReportContent:
    """Return the content of a report."""
    sections = tuple(_section(experiment, results) for experiment in results.worklist.experiments)
    every = tuple(verdict for section in sections for verdict in section.verdicts)
    used = _used(results)
    return ReportContent(
        title=f"The regularization effects of dropout, reproduced at scale “{scale}”",
        summary=_summary(every, used),
        sections=sections,
        verdicts=every,
        settings=_settings(results),
        provenance=_provenance(used),
    )


def _used(results: Results) -> list[Record]:
    """Every record that the experiments use, tuning runs included, each once."""
    runs = {run.key for run in results.worklist.needed(results.records)}
    return [record for key in sorted(runs) if (record := results.records.get(key)) is not None]


def _summary(every: Sequence[Verdict], used: Sequence[Record]) -> str:
    counts = Counter(verdict.verdict for verdict in every)
    hours = sum(record.seconds for record in used) / 3600.0
    seeds = max((verdict.seeds for verdict in every), default=0)
    return (
        f"Of {len(every)} claims, {counts[HOLDS]} hold, {counts[DOES_NOT_HOLD]} fail at this scale, "
        f"{counts[UNDECIDED]} are undecided and {counts[NOT_RUN]} not run. {len(used)} runs, up to "
        f"{seeds} seeds per method, {hours:.1f} hours of one core."
    )


def _section(experiment: tables.Experiment, results: Results) -> Section:
    rows = tuple(_row(experiment, cell, results) for cell in experiment.cells)
    sources = dict.fromkeys(row.paper.where for row in rows if row.paper is not None)
    return Section(
        experiment,
        rows,
        _table(experiment, rows, paper=results.worklist.scale == "paper"),
        tuple(verdicts(experiment, results)),
        tuple(sources),
    )


def _row(experiment: tables.Experiment, cell: str, results: Results) -> Row:
    planned = results.worklist.cells[cell]
    paper = results.worklist.scale == "paper"  # elsewhere only ratios can be compared
    return Row(
        cell,
        planned.setting.name,
        planned.method.name,
        planned.method.label,
        results.interval(experiment.measure, cell),
        tables.paper_number(experiment.name, cell) if paper else None,
        _cost(results, cell),
        _choice(planned.method, planned.choice(results.records)),
    )


def _cost(results: Results, cell: str) -> float | None:
    """A step's time divided by plain dropout's, from records of the same code and machine."""
    pace = MEASURES["seconds_per_step"].compute
    ratios = [
        pace(own, own) / pace(plain, plain)
        for own, plain in results.pairs(cell).values()
        if (own.commit, own.machine) == (plain.commit, plain.machine)
    ]
    return statistics.median(ratios) if ratios else None


def _choice(method: tables.Method, choice: int | None) -> str:
    """The variant that the tuning chose, and the number of variants."""
    if len(method.tune) < 2 or choice is None:
        return ""
    chosen = [f"{k} = {v:g}" for part in method.tune[choice].values() for k, v in part.items()]
    return f"{chosen[0]}, best of {len(method.tune)}"


def _table(experiment: tables.Experiment, rows: Sequence[Row], *, paper: bool) -> Table:
    """The numbers; the paper's are shown only at the paper's own scale."""
    measure = MEASURES[experiment.measure]
    several = len({row.setting for row in rows}) > 1
    heads = ["method", measure.label, "95 % interval", "seeds", "cost of a step"]
    heads += ["the paper's"] if paper else []
    cells = [(_name(row, several), *_numbers(row, measure.digits)) for row in rows]
    if paper:
        theirs = ["" if row.paper is None else f"{row.paper.value:g}" for row in rows]
        cells = [(*cell, number) for cell, number in zip(cells, theirs, strict=True)]
    return Table(heads, cells, numbers=heads[1:])


def _name(row: Row, several: bool) -> str:
    setting = f"{row.setting}: " if several else ""
    return setting + row.label + (f" ({row.choice})" if row.choice else "")


def _numbers(row: Row, digits: int) -> tuple[str, ...]:
    cost = "" if row.cost is None else f"× {row.cost:.2f}"
    found = row.interval
    if found is None:
        return "not run yet", "", "0", cost
    between = _between(found.low, found.high, digits, found.seeds)
    return format_number(found.estimate, digits), between, str(found.seeds), cost


def _between(low: float | None, high: float | None, digits: int, seeds: int) -> str:
    """An interval as text; one seed has none."""
    return f"{format_number(low, digits)} – {format_number(high, digits)}" if seeds > 1 else ""


def format_number(value: float | None, digits: int) -> str:
    """Return a number as text; infinity means that a quality was never reached."""
    if value is None:
        return ""
    return "never" if value == float("inf") else f"{value:.{digits}f}"


def _settings(results: Results) -> Table:
    settings = {cell.setting.name: cell for cell in results.worklist.cells.values()}
    rows = []
    for name, cell in settings.items():
        config = cell.run(0, cell.seeds[0]).config
        model, data = (
            ", ".join(f"{k} {v}" for k, v in cell.setting.settings[part].items() if k != "name")
            for part in ("model", "data")
        )
        how = f"{config.optimizer.name}, lr {config.optimizer.lr:g}, clip {config.optimizer.clip}, "
        how += f"{config.schedule.name}, {cell.setting.settings['train']['epochs']} epochs"
        if cell.setting.time is not None:
            how += f" of dropout; other methods as many as fit into {cell.setting.time:g} times its time"
        rows.append((name, f"{config.model.name}: {model}", f"{config.data.name}: {data}", how))
    return Table(("setting", "model", "data", "training"), rows)


def _provenance(used: Sequence[Record]) -> Table:
    made = Counter(
        (
            ", ".join(f"{name} {version}" for name, version in record.versions.items()),
            f"{record.machine.get('platform')}, {record.machine.get('device')}",
            (record.commit or "")[:12] + ("+" if (record.commit or "").endswith("+") else ""),
        )
        for record in used
    )
    rows = [(*what, str(count)) for what, count in made.most_common()]
    return Table(("versions", "machine", "commit", "runs"), rows, numbers=("runs",))


_MARKS = {HOLDS: "good", DOES_NOT_HOLD: "bad", UNDECIDED: "open", NOT_RUN: "open"}
_HOW = (
    "A ratio is the geometric mean over seeds, paired by seed, with Student's interval. A claim holds "
    "if the whole interval lies in the range that the claim asks for. For an undecided claim, the last "
    "column is the number of seeds that would decide it with a probability of 80 %, if the measured "
    "ratio and spread are the true ones."
)


def as_html(content: ReportContent, figures: Mapping[str, str]) -> str:
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


def as_markdown(content: ReportContent, figures: Mapping[str, str]) -> str:
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
            format_number(verdict.estimate, 3),
            _between(verdict.low, verdict.high, 3, verdict.seeds),
            verdict.asked,
            format_number(verdict.paper, 3),
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


_FORMATS = ("png", "pdf")


def write_report(
    folder: Path,
    names: Sequence[str],
    scale: str,
    seeds: int | None = None,
    out: Path | None = None,
) -> list[Path]:
    """Write ``report.html``, ``report.md``, ``figures/`` and ``claims.json``.

    Args:
        folder: a folder of results, with its ``records/``.
        names: the names of the experiments.
        scale: the scale of the records.
        seeds: the number of seeds to use; None uses all.
        out: the folder to write to; the folder of results by default.

    Raises:
        RunError: if there are no records.
        MissingExtraError: if matplotlib is not installed.
    """
    check_drawable()
    records = Records(folder / "records")
    worklist = Worklist(names, scale, seeds or max((record.seed for record in records), default=1))
    if not len(records):
        raise RunError(f"{folder} has no records: run `undrop reproduce --scale {scale}` first.")
    out = out or folder
    with naming_disk_errors(out):
        (out / "figures").mkdir(parents=True, exist_ok=True)
    results = Results(worklist, records)
    content = report_content(results, scale)
    inline: dict[str, str] = {}
    files: dict[str, str] = {}
    for section in content.sections:
        name = section.experiment.name
        figure = draw(section, results)
        if figure is not None:
            inline[name] = svg(figure, section.experiment.title)
            files[name] = f"figures/{name}.{_FORMATS[0]}"
            for kind in _FORMATS:
                save(figure, out / "figures" / f"{name}.{kind}")
    html.write(out / "report.html", as_html(content, inline))
    html.write(out / "report.md", as_markdown(content, files))
    write_json(out / "claims.json", as_json(content.verdicts))
    return [out / name for name in ("report.html", "report.md", "claims.json")]
