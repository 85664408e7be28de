"""Changes to pages that mkdocs alone does not make."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([\w.]+)</code>")
_CELL = re.compile(r"<td[ >].*?</td>", re.S)
_IN_A_FIGURE = re.compile(r"(?<=[\d%]) (?=[±…])|(?<=[±…]) (?=[-\d])")
_VERDICTS = "<!-- verdicts -->"
_GLOSSARY = "<!-- glossary -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the verdicts that ``undrop report`` wrote, and the glossary of CONTRIBUTING.md."""
    markdown = markdown.replace(_VERDICTS, verdicts(ROOT / "results" / "small" / "claims.json"))
    return markdown.replace(_GLOSSARY, glossary(ROOT / "CONTRIBUTING.md"))


def on_page_content(html: str, **_: Any) -> str:
    """Show the roles of docstrings, such as :class:`~undrop.Step`, as the bare name.

    In tables, "1.2 ± 0.3" and "(1.1 … 1.3)" stay on one line.
    """
    html = _ROLE.sub(lambda role: f"<code>{role[1].rpartition('.')[2]}</code>", html)
    return _CELL.sub(lambda cell: _IN_A_FIGURE.sub("\N{NO-BREAK SPACE}", cell[0]), html)


def glossary(path: Path) -> str:
    """The table of the glossary, which has its home in CONTRIBUTING.md."""
    section = path.read_text(encoding="utf-8").partition("## Glossary")[2]
    return "\n".join(line for line in section.splitlines() if line.startswith("|"))


def verdicts(path: Path) -> str:
    """The claims and their verdicts, as a table."""
    if not path.exists():
        return "There is no summary yet: `undrop report results/small` writes it."
    lines = ["| claim | verdict | ratio, 95 % interval | paper | seeds |", "|---|---|---|---|---|"]
    lines += [_row(claim) for claim in json.loads(path.read_text(encoding="utf-8"))]
    return "\n".join(["At the scale `small`:", "", *lines])


def _row(claim: dict[str, Any]) -> str:
    sentence = claim["claim"].replace("|", "\\|")
    ratio = "–" if claim["estimate"] is None else f"{claim['estimate']:.3g}"
    if claim["low"] is not None and claim["high"] is not None:
        ratio += f" ({claim['low']:.3g} … {claim['high']:.3g})"
    paper = "–" if claim["paper"] is None else f"{claim['paper']:.3g}"
    return f"| {sentence} | {claim['verdict']} | {ratio} | {paper} | {claim['seeds']} |"
