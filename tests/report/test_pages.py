"""Pages, figures and JSON."""

import re
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from undrop.errors import MissingExtraError, OptionError
from undrop.report import as_json, figures, html


@dataclass
class Result:
    loss: float
    path: Path
    parts: tuple[float, ...] = ()


Pair = namedtuple("Pair", ["low", "high"])


class WithToJson:
    def to_json(self):
        return "own"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (
            Result(1.5, Path("a/b"), (1.0, float("inf"))),
            {"loss": 1.5, "path": "a/b", "parts": [1.0, None]},
        ),
        (Pair(1, None), {"low": 1, "high": None}),
        ({1: WithToJson(), "x": {True}}, {"1": "own", "x": [True]}),
        (np.array([1.0, np.nan]), [1.0, None]),
        (torch.tensor(3), 3),
        (np.float32(0.5), 0.5),
    ],
)
def test_results_convert_to_json(value, plain):
    assert as_json(value) == plain


def test_as_json_refuses_an_object_that_json_cannot_hold():
    with pytest.raises(TypeError, match="object can't be converted to JSON"):
        as_json(object())


def test_a_page_refers_to_no_other_file_and_escapes_its_text():
    page = html.page(
        "a < b", html.callout("First", html.bullets(["use `p < 0.5`"])), html.paragraph("x & y")
    )
    assert "<h1>a &lt; b</h1>" in page
    assert "<code>p &lt; 0.5</code>" in page
    assert "x &amp; y" in page
    assert "http" not in page
    assert "src=" not in page


def test_the_style_of_a_fragment_applies_only_inside_it():
    style = html.fragment("<p>x</p>").split("<style>")[1].split("</style>")[0]
    rules = [line.split("{")[0] for line in style.splitlines() if "{" in line]
    selectors = [s.strip() for rule in rules for s in rule.split(",") if not rule.startswith("@")]
    assert all(".undrop" in selector for selector in selectors)


def drawn():
    figure = figures.new_figure(4, 3)
    with figures.styled():
        axes = figure.subplots()
        axes.plot([0, 1], [1, 0], **figures.line_style(1))
        axes.set_title(figures.literal("$a"))
    return figure


def test_equal_figures_are_saved_as_equal_bytes(tmp_path):
    for kind in ("png", "pdf", "svg"):
        for name in "ab":
            figures.save(drawn(), tmp_path / f"{name}.{kind}")
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
    assert figures.svg(drawn(), "a < b").startswith('<svg role="img" aria-label="a &lt; b"')


def test_saving_a_figure_refuses_an_unknown_suffix(tmp_path):
    with pytest.raises(OptionError, match=r"x.xyz can't be drawn: .xyz is not a picture format"):
        figures.save(drawn(), tmp_path / "x.xyz")
    with pytest.raises(OptionError, match="it has no suffix"):
        figures.check_picture(tmp_path / "x")


def test_a_figure_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"a figure needs matplotlib: pip install"):
        figures.new_figure(4, 3)


def test_importing_undrop_report_loads_neither_matplotlib_nor_rich_nor_torch():
    code = (
        "import sys, undrop.report, undrop.report.html, undrop.report.figures\nprint(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"matplotlib", "rich", "torch", "numpy"} & set(loaded)


def test_the_style_of_tables_overrides_the_style_of_notebooks():
    """Jupyter aligns the cells of every table to the right by a class and an element."""
    rules = re.findall(r"^(.*) \{ text-align", html.fragment("x"), re.M)
    assert ".undrop.undrop th, .undrop.undrop td" in rules
