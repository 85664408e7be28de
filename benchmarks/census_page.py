"""Write docs/census.md from the results of the census."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "census.md"
NAMES = {
    "timm": ("timm", "timm", "model files"),
    "transformers": ("Transformers", "transformers", "model types"),
    "peft": ("PEFT", "peft", "methods"),
    "pyg": ("PyG", "torch_geometric", "layers, pools, models and dropping functions"),
}
Row = dict[str, Any]

INTRO = """\
# Census

<!-- Written by benchmarks/census.py: change the program, not the page. -->

The census checks that undrop accounts for all random numbers of a training pass, in the model
families of four libraries. `benchmarks/census.py` builds a tiny model of each family, without a
download, and runs it in train mode with drop probabilities of 0.1. It counts the **draws** of the
plain pass: operations that PyTorch marks as seeded, and changes of Python's and NumPy's generators.
Each draw must belong to a **site**, or be **named** in the second table of `undrop.sites`.

Two checks find draws for which neither is true:

- **missed**: a module draws more often than it has sites and named draws.
- **silent**: two passes with different seeds differ, although the noise is off and the named draws
  are the same in both. To open all branches, the check first makes constant parameters random.

There are more sites than draws if LayerDrop skips a layer in the plain pass, because a skipped layer
draws nothing. Numbers that no code reads do not count: WavLM draws one for its first layer, which it
never skips. A family is *not built* if the program does not know how to build a tiny model that runs.
This says nothing about undrop.

To repeat the census, in the environment of `make install`:

```bash
python benchmarks/census.py run                       # families without a result; results/census.jsonl
python benchmarks/census.py run --again "not built"   # also families that did not build before
python benchmarks/census.py page                      # write this page
```
"""


def write_page(rows: list[Row], totals: dict[str, int]) -> None:
    """Write docs/census.md; ``totals`` says how many families each library has."""
    ran = [row for row in rows if row["status"] == "built"]
    parts = [INTRO, "\n".join(summary(rows, totals)), "\n".join(verdict(rows, ran))]
    parts += ["## What the sites are\n", "\n".join(kinds(ran))]
    parts += ["## What is named\n", "\n".join(named(ran)), "## Every family\n"]
    parts += ["\n".join(families(library, rows)) for library in NAMES]
    PAGE.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    print(parts[1])
    print(parts[2])


def summary(rows: list[Row], totals: dict[str, int]) -> list[str]:
    """Return a table with a line for each library."""
    heads = ("library", "families", "tried", "ran", "refused", "failed", "not built")
    heads += ("draws", "sites", "named", "missed", "silent")
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    for library in (*NAMES, None):
        own = [row for row in rows if library in (None, row["library"])]
        status = Counter(row["status"] for row in own)
        ran = [row for row in own if row["status"] == "built"]
        name = f"{NAMES[library][0]} {version(NAMES[library][1])}" if library else "**all**"
        known = totals[library] if library else sum(totals.values())
        figures = [
            known,
            len(own),
            *(status[s] for s in ("built", "refused", "failed", "not built")),
        ]
        figures += [sum(row[what] for row in ran) for what in ("draws", "sites", "named")]
        figures += [sum(missed(row) for row in ran), sum(row["silent"] for row in ran)]
        lines.append(f"| {name} | " + " | ".join(f"{n}" for n in figures) + " |")
    return [*lines, ""]


def missed(row: Row) -> int:
    """Return the number of draws of a family that are neither sites nor named."""
    return sum(row["missed"].values())


def verdict(rows: list[Row], ran: list[Row]) -> list[str]:
    """Return a list of the families with missed or silent draws, and of those refused or failed."""
    lines: list[str] = []
    for row in ran:
        if missed(row) or row["silent"]:
            where = ", ".join(f"`{path or 'the model'}` ({n})" for path, n in row["missed"].items())
            word = "silent" if row["silent"] else "missed"
            lines.append(f"- {word}: {NAMES[row['library']][0]} `{row['family']}`: {where}")
    for row in rows:
        if row["status"] in ("refused", "failed"):
            lines.append(
                f"- {row['status']}: {NAMES[row['library']][0]} `{row['family']}`: {row['why']}"
            )
    void = [row["family"] for row in ran if not row["finite"]]
    if void:
        lines.append(f"- not finite, so checked by place alone: {', '.join(void)}")
    return [*(lines or ["In the families that ran, nothing is missed, silent or refused."]), ""]


def kinds(ran: list[Row]) -> list[str]:
    """Return a table of the kinds of sites: how many sites, and in how many families."""
    sites: Counter[str] = Counter()
    for row in ran:
        sites.update(row["kinds"])
    lines = ["| kind | sites | families |", "|---|--:|--:|"]
    for kind, count in sites.most_common():
        lines.append(f"| {kind} | {count} | {sum(kind in row['kinds'] for row in ran)} |")
    return [*lines, ""]


def named(ran: list[Row]) -> list[str]:
    """Return a table of the draws that belong to no site, with their families."""
    where: dict[str, list[str]] = {}
    for row in ran:
        for who in row["who"]:
            function, _, file = who.partition(" at ")
            where.setdefault(f"| {function} | `{file}`" if file else f"| {function} |", []).append(
                row["family"]
            )
    lines = ["| draws with | in | families |", "|---|---|---|"]
    return [*lines, *(f"{key} | {', '.join(sorted(set(own)))} |" for key, own in where.items()), ""]


def families(library: str, rows: list[Row]) -> list[str]:
    """Return a folded table of all families of a library."""
    own = sorted((r for r in rows if r["library"] == library), key=lambda r: r["family"].lower())
    name, _, what = NAMES[library]
    lines = [f'??? note "{name}: {len(own)} {what}"', ""]
    lines += ["    | family | draws | sites | named | missed |", "    |---|--:|--:|--:|--:|"]
    for row in own:
        if row["status"] == "built":
            figures = (row["draws"], row["sites"], row["named"], missed(row))
            lines.append(f"    | {row['family']} | " + " | ".join(map(str, figures)) + " |")
    absent = [row for row in own if row["status"] == "not built"]
    if absent:
        lines += ["", f"    Not built ({len(absent)}):", ""]
        lines += [f"    - {row['family']}: `{row['why'].replace('`', chr(39))}`" for row in absent]
    return [*lines, ""]
