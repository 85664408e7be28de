"""The report: figures, tables and verdicts as an HTML page, as Markdown and as JSON."""

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
    """One row of an experiment's table, about one cell."""

    cell: str  # setting:method
    setting: str
    method: str
    label: str
    interval: Interval | None  # of the experiment's measure; None without records
    paper_number: tables.PaperNumber | None  # only at the scale "paper"
    cost: float | None  # the time of a step, divided by the time of a step of plain dropout
    best_variant: str  # of a tuned method; else empty


@dataclass(frozen=True)
class ReportSection:
    """The part of the report about one experiment."""

    experiment: tables.Experiment
    rows: tuple[Row, ...]
    table: Table
    verdicts: tuple[Verdict, ...]
    sources: tuple[str, ...]  # where the paper reports its numbers


@dataclass(frozen=True)
class ReportContent:
    """The content of a report, before it becomes HTML, Markdown or JSON."""

    title: str
    summary: str
    sections: tuple[ReportSection, ...]
    verdicts: tuple[Verdict, ...]
    settings: Table
    provenance: Table


def report_content(results: Results, scale: str) -> ReportContent:
    """Return the report on all experiments of the worklist."""
    sections = tuple(_section(experiment, results) for experiment in results.worklist.experiments)
    all_verdicts = tuple(verdict for section in sections for verdict in section.verdicts)
    records = _records_used(results)
    return ReportContent(
        title=f"The regularization effects of dropout, reproduced at scale “{scale}”",
        summary=_summary(all_verdicts, records),
        sections=sections,
        verdicts=all_verdicts,
        settings=_settings(results),
        provenance=_provenance(records),
    )


def _records_used(results: Results) -> list[Record]:
    """Return every record that the experiments use, including those of tuning runs."""
    keys = {run.key for run in results.worklist.needed(results.records)}
    return [record for key in sorted(keys) if (record := results.records.get(key)) is not None]


def _summary(verdicts: Sequence[Verdict], records: Sequence[Record]) -> str:
    counts = Counter(verdict.verdict for verdict in verdicts)
    hours = sum(record.seconds for record in records) / 3600.0
    seeds = max((verdict.seeds for verdict in verdicts), default=0)
    return (
        f"Of {len(verdicts)} claims, {counts[HOLDS]} hold, {counts[DOES_NOT_HOLD]} do not hold at this "
        f"scale, {counts[UNDECIDED]} are undecided and {counts[NOT_RUN]} have not been run. There are "
        f"{len(records)} runs with up to {seeds} seeds per method, which took {hours:.1f} core hours."
    )


def _section(experiment: tables.Experiment, results: Results) -> ReportSection:
    rows = tuple(_row(experiment, cell, results) for cell in experiment.cells)
    sources = dict.fromkeys(row.paper_number.source for row in rows if row.paper_number is not None)
    return ReportSection(
        experiment,
        rows,
        _table(experiment, rows, with_paper=results.worklist.scale == "paper"),
        tuple(verdicts(experiment, results)),
        tuple(sources),
    )


def _row(experiment: tables.Experiment, cell: str, results: Results) -> Row:
    planned = results.worklist.cells[cell]
    # At other scales, only ratios can be compared with the paper's.
    at_paper_scale = results.worklist.scale == "paper"
    return Row(
        cell,
        planned.setting.name,
        planned.method.name,
        planned.method.label,
        results.interval(experiment.measure, cell),
        tables.paper_number(experiment.name, cell) if at_paper_scale else None,
        _cost(results, cell),
        _variant_in_words(planned.method, planned.best_variant(results.records)),
    )


def _cost(results: Results, cell: str) -> float | None:
    """Return the time of a step divided by dropout's, from records of the same code and machine."""
    seconds = MEASURES["seconds_per_step"].compute
    ratios = [
        seconds(record, record) / seconds(reference, reference)
        for record, reference in results.pairs(cell).values()
        if (record.commit, record.machine) == (reference.commit, reference.machine)
    ]
    return statistics.median(ratios) if ratios else None


def _variant_in_words(method: tables.Method, index: int | None) -> str:
    """Return the first option of the best variant, and the number of variants."""
    if len(method.tune) < 2 or index is None:
        return ""
    options = [f"{k} = {v:g}" for part in method.tune[index].values() for k, v in part.items()]
    return f"{options[0]}, best of {len(method.tune)}"


def _table(experiment: tables.Experiment, rows: Sequence[Row], *, with_paper: bool) -> Table:
    """Return the experiment's table of numbers, optionally with a column for the paper's numbers."""
    measure = MEASURES[experiment.measure]
    several_settings = len({row.setting for row in rows}) > 1
    headers = ["method", measure.label, "95 % interval", "seeds", "cost of a step"]
    headers += ["in the paper"] if with_paper else []
    lines = []
    for row in rows:
        name = f"{row.setting}: {row.label}" if several_settings else row.label
        name += f" ({row.best_variant})" if row.best_variant else ""
        line = [name, *_numbers(row, measure.digits)]
        if with_paper:
            line.append("" if row.paper_number is None else f"{row.paper_number.value:g}")
        lines.append(line)
    return Table(headers, lines, numbers=headers[1:])


def _numbers(row: Row, digits: int) -> tuple[str, ...]:
    """Return the mean, the interval, the number of seeds and the cost of a step, as text."""
    cost = "" if row.cost is None else f"× {row.cost:.2f}"
    interval = row.interval
    if interval is None:
        return "not run yet", "", "0", cost
    limits = _format_limits(interval.low, interval.high, digits, interval.seeds)
    return format_number(interval.estimate, digits), limits, str(interval.seeds), cost


def _format_limits(low: float | None, high: float | None, digits: int, seeds: int) -> str:
    """Return the limits of an interval as text. One seed has no interval."""
    return f"{format_number(low, digits)} – {format_number(high, digits)}" if seeds > 1 else ""


def format_number(value: float | None, digits: int) -> str:
    """Return a number as text; infinity means that a quality was never reached."""
    if value is None:
        return ""
    return "never" if value == float("inf") else f"{value:.{digits}f}"


def _settings(results: Results) -> Table:
    """Return the table of the model, the data and the training of each setting."""
    cells = {cell.setting.name: cell for cell in results.worklist.cells.values()}
    rows = []
    for name, cell in cells.items():
        config = cell.run(0, cell.seeds[0]).config
        model, data = (
            ", ".join(f"{k} {v}" for k, v in cell.setting.config[part].items() if k != "name")
            for part in ("model", "data")
        )
        epochs, limit = f"{cell.setting.config['train']['epochs']} epochs", cell.setting.time_limit
        if limit is not None:
            times = "" if limit == 1.0 else f"{limit:g} times "
            epochs = f"as many epochs as fit into {times}the time of {epochs} of dropout"
        training = (
            f"{config.optimizer.name}, lr {config.optimizer.lr:g}, clip {config.optimizer.clip}, "
            f"{config.schedule.name}, {epochs}"
        )
        model, data = f"{config.model.name}: {model}", f"{config.data.name}: {data}"
        rows.append((name, model, data, training))
    return Table(("setting", "model", "data", "training"), rows)


def _provenance(records: Sequence[Record]) -> Table:
    """Return the table of the versions, machines and commits that the records come from."""
    origins = Counter(
        (
            ", ".join(f"{name} {version}" for name, version in record.versions.items()),
            f"{record.machine.get('platform')}, {record.machine.get('device')}",
            (record.commit or "")[:12] + ("+" if (record.commit or "").endswith("+") else ""),
        )
        for record in records
    )
    rows = [(*origin, str(count)) for origin, count in origins.most_common()]
    return Table(("versions", "machine", "commit", "runs"), rows, numbers=("runs",))


_MARKS = {HOLDS: "good", DOES_NOT_HOLD: "bad", UNDECIDED: "open", NOT_RUN: "open"}
_EXPLANATION = (
    "A ratio is the geometric mean over seeds of ratios between runs with the same seed, with Student's "
    "interval. A claim holds if the whole interval lies in the claim's range. For an undecided claim, "
    "the last column is the number of seeds that would decide it with a probability of 80 %, if the "
    "measured ratio and its spread over seeds are the true ones."
)


def as_html(content: ReportContent, figures: Mapping[str, str]) -> str:
    """Return the report as an HTML page that needs no other file.

    Args:
        content: the report.
        figures: the ``<svg>`` element of each experiment's figure, by the experiment's name.
    """
    links, chapters = "", []
    for section in content.sections:
        experiment = section.experiment
        links += f'<a href="#{experiment.name}">{html.escape(experiment.title)}</a>'
        chapters.append(_section_html(section, figures.get(experiment.name)))
    return html.page(
        content.title,
        html.paragraph(content.summary, "lead"),
        f"<nav>{links}</nav>",
        html.heading("Verdicts"),
        html.paragraph(_EXPLANATION),
        _verdict_table(content.verdicts).html("cards", _MARKS),
        *chapters,
        html.heading("Settings"),
        content.settings.html(),
        html.heading("Made with"),
        content.provenance.html(),
    )


def _section_html(section: ReportSection, figure: str | None) -> str:
    experiment = section.experiment
    parts = [
        html.heading(experiment.title, anchor=experiment.name),
        html.paragraph(f"{experiment.paper} · `{experiment.name}`", "soft"),
        html.paragraph(experiment.about.strip()),
        "" if figure is None else html.figure(figure),
        section.table.html(),
        *(html.paragraph(f"The paper’s numbers: {s}.", "soft") for s in section.sources),
        _verdict_table(section.verdicts).html("cards", _MARKS),
    ]
    return '<section class="chapter">\n' + "\n".join(filter(None, parts)) + "\n</section>"


def as_markdown(content: ReportContent, figures: Mapping[str, str]) -> str:
    """Return the report as Markdown.

    Args:
        content: the report.
        figures: the path of each experiment's figure, by the experiment's name.
    """
    parts = [f"# {content.title}", content.summary, "## Verdicts", _EXPLANATION]
    parts.append(_verdict_table(content.verdicts).markdown())
    for section in content.sections:
        experiment = section.experiment
        parts += [f"## {experiment.title}", f"*{experiment.paper}* · `{experiment.name}`"]
        parts.append(experiment.about.strip())
        if experiment.name in figures:
            parts.append(f"![{experiment.title}]({figures[experiment.name]})")
        parts.append(section.table.markdown())
        parts += [f"The paper's numbers: {source}." for source in section.sources]
        parts.append(_verdict_table(section.verdicts).markdown())
    parts += ["## Settings", content.settings.markdown()]
    parts += ["## Made with", content.provenance.markdown()]
    return "\n\n".join(parts) + "\n"


def _verdict_table(verdicts: Sequence[Verdict]) -> Table:
    text_headers = ("claim", "verdict")
    number_headers = ("ratio", "95 % interval", "range", "in the paper", "seeds", "seeds to decide")
    rows = [
        (
            _claim_lines(verdict),
            verdict.verdict,
            format_number(verdict.estimate, 3),
            _format_limits(verdict.low, verdict.high, 3, verdict.seeds),
            verdict.asked,
            format_number(verdict.paper, 3),
            str(verdict.seeds),
            "" if verdict.needed is None else str(verdict.needed),
        )
        for verdict in verdicts
    ]
    return Table((*text_headers, *number_headers), rows, numbers=number_headers)


def _claim_lines(verdict: Verdict) -> str:
    """Return the claim, its ratio in words, and a likely reason why it does not hold."""
    reason = verdict.reason and f"A likely reason: {verdict.reason}"
    return "\n".join(filter(None, (verdict.claim, verdict.measured, reason)))


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
        folder: the folder of results; the records are in its ``records/``.
        names: the names of the experiments.
        scale: the scale of the records.
        seeds: the number of seeds to use; by default all.
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
    elements: dict[str, str] = {}
    paths: dict[str, str] = {}
    for section in content.sections:
        name = section.experiment.name
        figure = draw(section, results)
        if figure is not None:
            elements[name] = svg(figure, section.experiment.title)
            paths[name] = f"figures/{name}.{_FORMATS[0]}"
            for kind in _FORMATS:
                save(figure, out / "figures" / f"{name}.{kind}")
    html.write(out / "report.html", as_html(content, elements))
    html.write(out / "report.md", as_markdown(content, paths))
    write_json(out / "claims.json", as_json(content.verdicts))
    return [out / name for name in ("report.html", "report.md", "claims.json")]
