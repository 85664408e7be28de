"""Run the notebooks of the gallery and write them, with their output, as pages of the docs.

    python gallery/render.py             # all of them, into docs/gallery
    python gallery/render.py 04_lora     # some of them

A notebook is a Python script in jupytext's percent format: Jupyter, VS Code and ``python`` run it.
A page shows what its cells print and the figures they leave open.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import jupytext
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
PAGES = HERE.parent / "docs" / "gallery"
_BARS = re.compile(r"[^\n]*\r")


def notebooks() -> list[Path]:
    """The scripts of the gallery, in order."""
    return sorted(HERE.glob("[0-9]*.py"))


def page_of(script: Path) -> Path:
    """Where the rendered notebook goes."""
    return PAGES / f"{script.stem[3:].replace('_', '-')}.md"


def render(script: Path) -> None:
    """Run a notebook cell by cell and write its page and its figures."""
    page = page_of(script)
    parts: list[str] = []
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    for number, cell in enumerate(jupytext.read(script).cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        code = compile(cell.source, f"{script.name}, cell {number}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, namespace)
        printed = _BARS.sub("", out.getvalue()).rstrip()
        if printed:
            parts.append(f"```text\n{printed}\n```")
        parts += _figures(page, number)
    first, *rest = parts
    source = (
        f"[gallery/{script.name}](https://github.com/undrop/undrop/blob/main/gallery/{script.name})"
    )
    note = f"*This page is the notebook {source} with its output.*"
    wide = "---\nhide: [toc]\n---"  # room for code; a page has one heading
    page.write_text("\n\n".join([wide, first, *rest, note]) + "\n", encoding="utf-8")


def _figures(page: Path, number: int) -> list[str]:
    """Save the open figures of a cell, and return the lines that show them."""
    lines = []
    for figure in map(plt.figure, plt.get_fignums()):
        name = f"{page.stem}-{number}.png"
        figure.savefig(page.parent / name, dpi=120)
        lines.append(f"![Figure of the cell above]({name})")
    plt.close("all")
    return lines


def main() -> None:
    """Render the notebooks named on the command line, or all."""
    plt.switch_backend("agg")
    warnings.filterwarnings("ignore", message=".*non-interactive.*")
    PAGES.mkdir(exist_ok=True)
    wanted = sys.argv[1:] or [script.stem for script in notebooks()]
    for script in notebooks():
        if script.stem in wanted:
            print(script.name, flush=True)
            render(script)


if __name__ == "__main__":
    main()
