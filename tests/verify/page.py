"""A report as a page."""

from pathlib import Path
from typing import Any

from undrop.report import Table, duration, html

TITLES = {
    "maths": "The math tests",
    "bench": "The time of a step",
    "training": "A short training",
}


def all_well(report: dict[str, Any]) -> bool:
    """Whether every part ran and no test failed."""
    parts = [report[name] for name in TITLES]
    return not any("error" in part for part in parts) and report["maths"]["failed"] == 0


def summary(name: str, part: dict[str, Any]) -> str:
    """Return one line on a part."""
    took = duration(part["seconds"])
    if "error" in part:
        return f"stopped after {took}: {part['error'].splitlines()[0]}"
    if name == "maths":
        counts = ", ".join(f"{part[kind]:,} {kind}" for kind in ("passed", "failed", "skipped"))
        return f"{counts} on {part['device']}, {took}"
    return f"done, {took}"


def write(path: Path, report: dict[str, Any]) -> None:
    """Write the page, whole or not at all."""
    well = "Everything that was run works here." if all_well(report) else "Something is wrong here."
    lines = [f"{TITLES[name]}: {summary(name, report[name])}." for name in TITLES]
    body = [html.callout(well, html.bullets(lines)), _machine(report)]
    for name, title in TITLES.items():
        body.append(html.heading(title))
        part = report[name]
        body += _error(part) if "error" in part else _SECTIONS[name](part)
    found = report["machine"]
    title = f"undrop on {found['device']}: {found['gpu'] or found['cpu']}"
    html.write(path, html.page(title, *body))


def _error(part: dict[str, Any]) -> list[str]:
    return [html.paragraph("It stopped with an error:"), f"<pre>{html.escape(part['trace'])}</pre>"]


def _machine(report: dict[str, Any]) -> str:
    found = {**report["machine"], **report["versions"]}
    rows = [[name.replace("_", " "), str(value)] for name, value in found.items() if value]
    return Table(["machine", ""], rows).html()


def _maths(part: dict[str, Any]) -> list[str]:
    rows = [
        [Path(name).stem, *(str(counts.get(k, 0)) for k in ("passed", "failed", "skipped"))]
        for name, counts in part["files"].items()
    ]
    heads = ["file", "passed", "failed", "skipped"]
    failures = [f"`{each['test']}`: {each['error']}" for each in part["failures"]]
    return [
        html.paragraph(
            "Every estimator is compared with an exact or enumerated answer in float64, "
            f"on the device `{part['device']}`."
        ),
        Table(heads, rows, numbers=heads[1:]).html(),
        html.heading("What failed", level=3) + html.bullets(failures) if failures else "",
    ]


def _bench(part: dict[str, Any]) -> list[str]:
    rows = [
        [
            model,
            row["name"],
            f"{row['ratio']:.2f}",
            f"{row['low']:.2f} – {row['high']:.2f}",
            f"{row['seconds'] * 1000:.2f}",
        ]
        for model, found in part["models"].items()
        for row in found
    ]
    heads = ["model", "method", "× dropout", "90 % interval", "ms per step"]
    return [
        html.paragraph("Forward and backward pass of one step, in turns, as a ratio to dropout."),
        Table(heads, rows, numbers=heads[2:]).html(),
    ]


def _training(part: dict[str, Any]) -> list[str]:
    rows = [
        [name, f"{row['valid_ppl']:.1f}", f"{row['seconds']:.1f}"]
        for name, row in part["rows"].items()
    ]
    heads = ["objective", "validation perplexity", "seconds"]
    about = (
        "An LSTM language model, two epochs of 10,000 tokens. This shows that training runs, not "
        "that the model is good."
    )
    return [html.paragraph(about), Table(heads, rows, numbers=heads[1:]).html()]


_SECTIONS = {"maths": _maths, "bench": _bench, "training": _training}
