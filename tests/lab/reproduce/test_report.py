"""The report: one page without other files, escaped text, and the measured numbers."""

import json
import re
from html.parser import HTMLParser

import pytest

from fake_records import fake_record
from undrop.lab.reproduce import tables
from undrop.lab.reproduce.figures import mathtext
from undrop.lab.reproduce.records import Records
from undrop.lab.reproduce.report import as_html, as_markdown, report_content, write_report
from undrop.lab.reproduce.results import Results
from undrop.lab.reproduce.tables import EXPERIMENTS
from undrop.lab.reproduce.worklist import Worklist

NAMES = ["averaging-noise", "loss-hessian", "equal-time", "taylor", "dataset-size"]


def fill(folder, names, seeds=3):
    """Write records of all runs but Drop_32's; each cell is worse than the cell before it."""
    worklist, records = Worklist(names, "smoke", seeds), Records(folder / "records")
    for index, cell in enumerate(worklist.cells.values()):
        for variant in cell.variants if cell.method.name != "drop-32" else ():
            for seed in cell.seeds:
                best = 70.0 + index + variant + 0.1 * seed
                probed = {"dropped": 0.05, "quadratic": 0.04 + seed / 1000, "taylor_share": 0.85}
                run = cell.run(variant, seed)
                records.add(fake_record(run, [best + 9, best, best + 1], probed=probed))
    return worklist, records


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    fill(folder, NAMES)
    write_report(folder, NAMES, "smoke")
    return folder


class Page(HTMLParser):
    """Collects the elements of a page, and checks that they close in order."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_page_needs_no_other_file(report):
    text = (report / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\((?!#)|<script", text)
    assert sum(tag == "svg" for tag, _ in page.tags) == len(NAMES)
    assert any(tag == "meta" and a.get("name") == "viewport" for tag, a in page.tags)


def test_every_experiment_has_a_figure_in_every_format(report):
    for name in NAMES:
        for kind in ("png", "pdf"):
            assert (report / "figures" / f"{name}.{kind}").stat().st_size > 1000


def test_the_markdown_report_has_the_numbers_of_the_page(report):
    text = (report / "report.md").read_text()
    assert "| Drop₁ | 71.20 | 70.95 – 71.45 | 3 | × 1.00 |" in text
    assert "| Drop₃₂ | not run yet |  | 0 |  |" in text
    variants = len(tables.method("l2").variants())
    assert f"ℓ₂ (tuned) (weight = 3e-06, best of {variants})" in text
    assert "![How much of dropout's explicit effect is second order](figures/taylor.png)" in text
    page = (report / "report.html").read_text()
    assert "70.95 – 71.45" in page
    assert "not run yet" in page


def test_tables_have_the_papers_numbers_only_at_the_papers_scale(tmp_path):
    fill(tmp_path, ["taylor"])
    assert "in the paper" not in tables_of(tmp_path, "smoke")
    assert "in the paper" in tables_of(tmp_path, "paper")


def tables_of(folder, scale):
    worklist = Worklist(["ptb-table"], scale, 1)
    sections = report_content(Results(worklist, Records(folder / "records")), scale).sections
    return "".join(section.table.markdown() for section in sections)


def test_labels_of_figures_are_mathtext():
    assert mathtext("Drop₈ + ξ_approx, ρ = 1/4") == (
        r"Drop$_8$ + $\xi_\mathrm{approx}$, $\rho$ = 1/4"
    )
    labels = [tables.method(name).label for name in ("loss-jacobian", "l2", "drop-32", "analytic")]
    assert not any(set("₁₂₄₈₃ξρℓ") & set(mathtext(label)) for label in labels)


def test_claims_are_written_as_json(report):
    claims = json.loads((report / "claims.json").read_text())
    assert len(claims) == sum(len(tables.experiment(name).claims) for name in NAMES)
    taylor = next(claim for claim in claims if claim["experiment"] == "taylor")
    assert taylor["verdict"] == "holds"
    assert taylor["estimate"] == pytest.approx(0.85)
    assert taylor["paper"] == 0.83
    assert {claim["verdict"] for claim in claims} >= {"holds", "not run"}


def test_the_same_records_make_the_same_report_bytes(report, tmp_path):
    write_report(report, NAMES, "smoke", out=tmp_path)
    for name in ("report.html", "report.md", "claims.json", "figures/taylor.png"):
        assert (tmp_path / name).read_bytes() == (report / name).read_bytes()


def test_titles_of_a_report_are_escaped(tmp_path):
    worklist, records = fill(tmp_path, ["taylor"])
    content = report_content(Results(worklist, records), "<b>&")
    page = as_html(content, {})
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page
    assert Page(page).open == []
    table = as_markdown(content, {}).splitlines()
    rows = [line for line in table if line.startswith("|")]
    assert rows
    assert not any("<" in row.replace("<br>", "") for row in rows)


def test_text_from_records_is_escaped(tmp_path):
    worklist, _ = fill(tmp_path, ["taylor"])
    script = "<script>alert(1)</script>"
    facts = {
        "machine": {"platform": script, "device": script},
        "versions": {script: script},
        "commit": script,
    }
    for path in (tmp_path / "records").iterdir():
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    content = report_content(Results(worklist, Records(tmp_path / "records")), "smoke")
    page = as_html(content, {})
    assert "&lt;script&gt;alert(1)" in page
    assert "<script" not in page
    assert "<script" not in as_markdown(content, {})


def test_a_report_can_be_written_before_all_experiments_are_run(tmp_path):
    fill(tmp_path, ["replace-dropout"], seeds=1)
    write_report(tmp_path, EXPERIMENTS, "smoke", seeds=3)
    text = (tmp_path / "report.md").read_text()
    assert text.count("not run yet") > 50
    assert "0 hold, 0 do not hold at this scale" in text
