"""Which runs a worklist needs, in which order, with how many epochs, and how long they take."""

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
    # All three need Drop_1 on two seeds, so together they need four runs less.
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


def test_the_other_seeds_wait_for_the_tuning_and_then_need_the_best_variant(records):
    worklist = Worklist(["loss-hessian"], "smoke", seeds=3)
    cell = worklist.cells["ptb:l2"]
    assert cell.waiting_count(records) == 2
    assert cell.best_records(records) == {}
    for variant in cell.variants:
        assert cell.best_variant(records) is None
        records.add(fake_record(cell.run(variant, 1), [7.0 if variant == 1 else 8.0 + variant]))
    assert cell.best_variant(records) == 1
    assert cell.waiting_count(records) == 0
    assert {run.key for run in worklist.missing(records)} >= {
        cell.run(1, 2).key,
        cell.run(1, 3).key,
    }
    assert cell.run(0, 2).key not in {run.key for run in worklist.needed(records)}
    assert list(cell.best_records(records)) == [1]


def test_the_time_estimate_uses_the_records_of_a_setting(records, worklist):
    before = worklist.remaining_seconds(records)
    run = worklist.cells["ptb:drop-1"].run(0, 1)
    ten_times = 10 * worklist.estimated_seconds([run], records)[run.key]
    records.add(fake_record(run, [2.0], seconds=ten_times))
    left = before - ten_times / 10
    assert worklist.remaining_seconds(records) == pytest.approx(10 * left)


def test_the_time_estimate_includes_runs_that_wait_for_the_tuning(records):
    worklist = Worklist(["loss-hessian"], "smoke", seeds=3)
    missing = sum(worklist.estimated_seconds(worklist.missing(records), records).values())
    waiting = sum(cell.method.cost * count for cell, count in worklist.waiting(records))
    assert waiting > 0
    assert worklist.remaining_seconds(records) == pytest.approx(missing + 0.5 * waiting)


def test_runs_at_equal_time_have_as_many_epochs_as_fit():
    setting = tables.setting("ptb-timed", "small")
    epochs = tables.setting("ptb", "small").config["train"]["epochs"]
    for name in ("drop-1", "analytic", "analytic-quarter", "none"):
        method = tables.method(name)
        cost = setting.step_cost(method)
        config = Worklist(["equal-time"], "small", 1).cells[f"ptb-timed:{name}"].run(0, 1).config
        assert config.schedule.name == "cosine"
        assert config.train.epochs * cost <= epochs < (config.train.epochs + 1) * cost
    assert setting.step_cost(tables.method("drop-1")) == 1.0
    more = tables.setting("ptb-timed-more", "small")
    assert more.epochs(tables.method("drop-1")) == int(1.2 * epochs)


def test_a_search_shares_the_time_of_one_run_and_every_seed_chooses(records):
    worklist = Worklist(["rivals"], "small", seeds=2)
    cell = worklist.cells["ptb-timed:searched-p"]
    epochs = worklist.cells["ptb-timed:drop-1"].run(0, 1).config.train.epochs
    assert cell.run(0, 1).config.train.epochs == epochs // len(cell.variants)
    assert cell.waiting_count(records) == 0
    for seed in (1, 2):
        for variant in cell.variants:
            ppl = 7.0 if variant == seed - 1 else 8.0
            records.add(fake_record(cell.run(variant, seed), [ppl]))
    assert [cell.best_variant(records, seed) for seed in (1, 2)] == [0, 1]
    assert {s: r.best_valid_ppl for s, r in cell.best_records(records).items()} == {
        1: 7.0,
        2: 7.0,
    }
