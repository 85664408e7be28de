"""The gallery: every notebook runs as plain Python, quickly, and its page shows its code."""

import re
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch

jupytext = pytest.importorskip("jupytext")
plt = pytest.importorskip("matplotlib.pyplot")

GALLERY = Path(__file__).parents[1] / "gallery"
NOTEBOOKS = sorted(GALLERY.glob("[0-9]*.py"))
MINUTES = 5.0
FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
seconds = {}

pytestmark = [
    pytest.mark.xdist_group("gallery"),
    pytest.mark.filterwarnings("ignore:.*non-interactive"),
]
each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell.source for cell in jupytext.read(notebook).cells if cell.cell_type == "code"]


def page_of(notebook):
    return GALLERY.parent / "docs" / "gallery" / f"{notebook.stem[3:].replace('_', '-')}.md"


@each_notebook
def test_notebook_runs_and_ends_with_a_figure(notebook, tmp_path, monkeypatch):
    for extra in ("sklearn", "transformers", "peft"):
        if extra in notebook.read_text(encoding="utf-8"):
            pytest.importorskip(extra)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(notebook)])
    plt.switch_backend("agg")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    started = time.process_time()
    try:
        with torch.random.fork_rng():
            runpy.run_path(str(notebook), run_name="__main__")
        assert plt.get_fignums()
    finally:
        plt.close("all")
        torch.set_num_threads(threads)
    seconds[notebook] = time.process_time() - started


def test_all_notebooks_together_take_under_five_minutes():
    if len(seconds) < len(NOTEBOOKS):
        pytest.skip("not all notebooks ran in this process")
    assert sum(seconds.values()) < 60 * MINUTES


@each_notebook
def test_page_of_a_notebook_shows_its_present_code(notebook):
    page = page_of(notebook).read_text(encoding="utf-8")
    assert [cell.rstrip() for cell in FENCE.findall(page)] == code_cells(notebook), (
        f"run: python gallery/render.py {notebook.stem}"
    )


def test_every_notebook_is_listed_in_the_gallery():
    index = (GALLERY.parent / "docs" / "gallery" / "index.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) >= 8
    for notebook in NOTEBOOKS:
        assert f"({page_of(notebook).name})" in index, notebook.name
