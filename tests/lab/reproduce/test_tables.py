"""The TOML files of the experiments: everything that they name exists, at every scale."""

import pytest

from undrop.errors import OptionError, UnknownNameError
from undrop.lab.reproduce import tables
from undrop.lab.reproduce.figures import FIGURE_KINDS
from undrop.lab.reproduce.results import MEASURES
from undrop.lab.reproduce.tables import EXPERIMENTS, SCALES, experiment
from undrop.lab.reproduce.worklist import Worklist


@pytest.mark.parametrize("scale", SCALES)
def test_every_experiment_has_a_valid_config_at_every_scale(scale):
    worklist = Worklist(tables.experiments_at(scale), scale, seeds=2)
    keys = {
        cell.run(variant, seed).key
        for cell in worklist.cells.values()
        for variant in cell.variants
        for seed in cell.seeds
    }
    # No two runs share a key, except those of ptb-10k, which is the same setting as ptb.
    same = sum(cell.setting.name == "ptb-10k" for cell in worklist.cells.values())
    assert len(keys) == sum(len(cell.variants) * 2 for cell in worklist.cells.values()) - 2 * same


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_claims_are_about_cells_of_their_experiment(name):
    found = experiment(name)
    cells = set(found.cells)
    assert found.claims
    assert found.figure in FIGURE_KINDS
    assert found.measure in MEASURES
    for claim in found.claims:
        assert {*claim.numerator, *claim.denominator} <= cells
        assert claim.measure in MEASURES
        assert claim.above < claim.below


def test_measures_relative_to_plain_dropout_have_its_runs_in_the_experiment():
    for name in EXPERIMENTS:
        found = experiment(name)
        for claim in found.claims:
            for cell in (
                (*claim.numerator, *claim.denominator)
                if MEASURES[claim.measure].needs_reference
                else ()
            ):
                assert f"{cell.partition(':')[0]}:drop-1" in found.cells


def test_an_experiment_without_a_setting_at_a_scale_is_refused():
    assert "qrnn" not in tables.experiments_at("medium")
    assert "equal-time" in tables.experiments_at("medium")
    with pytest.raises(
        OptionError, match="qrnn has no scale 'medium'; available scales: smoke, small, paper"
    ):
        Worklist(["qrnn"], "medium", 1)


@pytest.mark.parametrize(
    ("experiment", "cell", "value"),
    [
        ("ptb-table", "ptb:drop-1", 73.76),
        ("ptb-table", "ptb:none", 122.16),
        ("wt2-table", "wt2:analytic", 84.57),
        ("loss-hessian", "ptb:identity", 108.76),
        ("loss-hessian", "ptb:loss-jacobian-noise", 79.54),
        ("dataset-size", "txl-fifth:drop-4", 47.40),
        ("qrnn", "qrnn:drop-4", 32.74),
    ],
)
def test_paper_number_returns_the_number_in_the_paper(experiment, cell, value):
    number = tables.paper_number(experiment, cell)
    assert number.value == value
    assert number.source


def test_the_paper_has_no_number_for_a_method_of_ours():
    assert tables.paper_number("strength", "ptb:analytic-quarter") is None


def test_a_claim_within_a_tolerance_has_an_interval_around_one():
    matches = experiment("noise-put-back").claims[1]
    assert matches.above == pytest.approx(1 / 1.02)
    assert matches.below == pytest.approx(1.02)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: experiment("ptb-tabel"),
            "unknown experiment 'ptb-tabel': did you mean 'ptb-table'",
        ),
        (lambda: tables.method("drop-3"), "unknown method 'drop-3'"),
        (lambda: tables.setting("ptb", "large"), "unknown scale 'large': there are smoke, small"),
        (lambda: tables.setting("c4", "small"), "unknown setting 'c4'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_names_that_exist(call, text):
    with pytest.raises(UnknownNameError, match=text):
        call()
