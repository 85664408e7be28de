"""Reports: one self-contained HTML page, the same as Markdown, figures as files, verdicts as JSON."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from undrop.errors import OptionError, RunError
from undrop.files import naming_disk_errors, replacing, write_json
from undrop.lab.reproduce.plan import Plan
from undrop.lab.reproduce.records import Records
from undrop.lab.reproduce.report.content import compose
from undrop.lab.reproduce.report.figures import as_svg, draw, save
from undrop.lab.reproduce.report.html import as_html
from undrop.lab.reproduce.report.markdown import as_markdown
from undrop.lab.reproduce.results import Results

__all__ = ["write_report"]


def write_report(
    folder: Path,
    names: Sequence[str],
    scale: str,
    seeds: int | None = None,
    out: Path | None = None,
) -> list[Path]:
    """Write ``report.html``, ``report.md``, ``figures/`` and ``claims.json``.

    Args:
        folder: a results folder, with its ``records/``.
        names: the experiments to report on.
        scale: the scale of the records.
        seeds: the number of seeds to report on; None is all that there are.
        out: where to write; the results folder itself unless given.

    Raises:
        RunError: if there are no records.
        OptionError: if matplotlib is not installed.
    """
    _check_matplotlib()
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
            inline[name] = as_svg(figure, section.experiment.title)
            files[name] = save(figure, out, name)
    pages = {
        "report.html": as_html(content, inline),
        "report.md": as_markdown(content, files),
    }
    for name, text in pages.items():
        with replacing(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    write_json(out / "claims.json", [verdict.as_dict() for verdict in content.verdicts])
    return [*(out / name for name in pages), out / "claims.json"]


def _check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("a report needs matplotlib: pip install 'undrop[plot]'.")
