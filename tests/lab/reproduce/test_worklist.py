"""Which runs are needed: shared ones once, tuning first, cheapest first."""

import pytest

from fake_records import fake_record
from undrop.lab.reproduce import tables
from undrop.lab.reproduce.records import Records
from undrop.lab.reproduce.worklist import Worklist


@pytest.fixture
def records(tmp_path):
    return Records(tmp_path)


def test_experiments_share_their_runs(records):
    names = ["noise-put-back", "replace-dropout", "explicit-only"]
    alone = sum(len(Worklist([name], "smoke", 2).needed(records)) for name in names)
    together = Worklist(names, "smoke", 2).needed(records)
    # Drop_1 is in all three: on two seeds, four runs fewer.
    assert len(together) == alone - 4
    assert len({run.key for run in together}) == len(together)


def test_a_worklist_lists_the_cheapest_runs_first(records):
    costs = [run.cost for run in Worklist(["averaging-noise"], "smoke", 3).needed(records)]
    assert costs == sorted(costs)


def test_a_worklist_is_missing_only_runs_without_a_record(records, worklist):
    run = worklist.needed(records)[0]
    records.add(fake_record(run, [2.0]))
    assert run.key not in {missing.key for missing in worklist.missing(records)}
    assert len(worklist.missing(records)) == len(worklist.needed(records)) - 1


def test_the_best_of_the_tuning_is_run_on_the_other_seeds(records):
    worklist = Worklist(["loss-hessian"], "smoke", seeds=3)
    cell = worklist.cells["ptb:l2"]
    assert cell.waiting(records) == 2
    assert cell.chosen_records(records) == {}
    for variant in cell.variants:
        assert cell.choice(records) is None
        records.add(fake_record(cell.run(variant, 1), [7.0 if variant == 1 else 8.0 + variant]))
    assert cell.choice(records) == 1
    assert cell.waiting(records) == 0
    assert {run.key for run in worklist.missing(records)} >= {
        cell.run(1, 2).key,
        cell.run(1, 3).key,
    }
    assert cell.run(0, 2).key not in {run.key for run in worklist.needed(records)}
    assert list(cell.chosen_records(records)) == [1]


def test_the_time_estimate_uses_the_records_of_a_setting(records, worklist):
    table = worklist.remaining(records)
    run = worklist.cells["ptb:drop-1"].run(0, 1)
    ten_times = 10 * worklist.estimates([run], records)[run.key]
    records.add(fake_record(run, [2.0], seconds=ten_times))
    left = table - ten_times / 10
    assert worklist.remaining(records) == pytest.approx(10 * left)


def test_the_time_estimate_includes_runs_that_wait_for_the_tuning(records):
    worklist = Worklist(["loss-hessian"], "smoke", seeds=3)
    named = sum(worklist.estimates(worklist.missing(records), records).values())
    later = sum(cell.method.cost * count for cell, count in worklist.waiting(records))
    assert later > 0
    assert worklist.remaining(records) == pytest.approx(named + 0.5 * later)


def test_runs_at_equal_time_have_as_many_epochs_as_fit():
    setting = tables.setting("ptb-timed", "small")
    epochs = tables.setting("ptb", "small").settings["train"]["epochs"]
    for name in ("drop-1", "analytic", "analytic-quarter", "none"):
        method = tables.method(name)
        cost = setting.step_cost(method)
        fit = Worklist(["equal-time"], "small", 1).cells[f"ptb-timed:{name}"].run(0, 1).config
        assert fit.schedule.name == "cosine"
        assert fit.train.epochs * cost <= epochs < (fit.train.epochs + 1) * cost
    assert setting.step_cost(tables.method("drop-1")) == 1.0
    more = tables.setting("ptb-timed-more", "small")
    assert more.epochs(tables.method("drop-1")) == int(1.2 * epochs)


def test_a_search_shares_the_time_of_one_run_and_every_seed_chooses(records):
    worklist = Worklist(["rivals"], "small", seeds=2)
    cell = worklist.cells["ptb-timed:searched-p"]
    one = worklist.cells["ptb-timed:drop-1"].run(0, 1).config.train.epochs
    assert cell.run(0, 1).config.train.epochs == one // len(cell.variants)
    assert cell.waiting(records) == 0
    for seed in (1, 2):
        for variant in cell.variants:
            better = variant == seed - 1
            records.add(fake_record(cell.run(variant, seed), [7.0 if better else 8.0]))
    assert [cell.choice(records, seed) for seed in (1, 2)] == [0, 1]
    assert {s: r.best_valid_ppl for s, r in cell.chosen_records(records).items()} == {
        1: 7.0,
        2: 7.0,
    }
