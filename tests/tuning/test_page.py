"""The tables of docs/tuning.md match the records in results/tuning."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_tables_of_the_page_match_the_records(monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import tuning_report

    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert tuning_report.fill(page, tuning_report.tables(ROOT / "results" / "tuning")) == page
