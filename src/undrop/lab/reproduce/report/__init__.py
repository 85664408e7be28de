"""Reports: the same content as one HTML page and as Markdown, figures, and verdicts as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undrop.errors import RunError
from undrop.files import naming_disk_errors, write_json
from undrop.lab.reproduce.plan import Plan
from undrop.lab.reproduce.records import Records
from undrop.lab.reproduce.report.content import as_html, as_markdown, compose
from undrop.lab.reproduce.report.figures import draw
from undrop.lab.reproduce.results import Results
from undrop.report import as_json, html
from undrop.report.figures import check_drawable, save, svg

__all__ = ["write_report"]

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
    plan = Plan(names, scale, seeds or max((record.seed for record in records), default=1))
    if not len(records):
        raise RunError(f"{folder} has no records: run `undrop reproduce --scale {scale}` first.")
    out = out or folder
    with naming_disk_errors(out):
        (out / "figures").mkdir(parents=True, exist_ok=True)
    results = Results(plan, records)
    content = compose(results, scale)
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
