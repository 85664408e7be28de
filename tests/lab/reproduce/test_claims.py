"""Verdicts on claims."""

import json
import math
from dataclasses import replace

import pytest

from fake_records import fake_record
from undrop.lab.reproduce.records import Records
from undrop.lab.reproduce.results import (
    DOES_NOT_HOLD,
    HOLDS,
    NOT_RUN,
    UNDECIDED,
    Interval,
    Results,
    decide,
    verdicts,
)
from undrop.lab.reproduce.tables import Claim, experiment
from undrop.lab.reproduce.worklist import Worklist
from undrop.report import as_json


def a_claim(above=0.0, below=math.inf):
    return Claim("It is so.", ("ptb:drop-8",), ("ptb:drop-1",), above=above, below=below)


@pytest.mark.parametrize(
    ("claim", "low", "high", "verdict"),
    [
        (a_claim(above=1.0), 1.01, 1.2, HOLDS),
        (a_claim(above=1.0), 0.99, 1.2, UNDECIDED),
        (a_claim(above=1.0), 0.9, 1.0, DOES_NOT_HOLD),
        (a_claim(above=0.98, below=1.02), 0.99, 1.01, HOLDS),
        (a_claim(above=0.98, below=1.02), 0.99, 1.03, UNDECIDED),
        (a_claim(above=0.98, below=1.02), 1.02, 1.03, DOES_NOT_HOLD),
        (a_claim(above=0.98, below=1.02), 0.90, 0.98, DOES_NOT_HOLD),
        (a_claim(above=0.5), 0.0, 0.0, DOES_NOT_HOLD),
    ],
)
def test_a_claim_is_decided_by_the_whole_interval(claim, low, high, verdict):
    assert decide(claim, Interval((low + high) / 2, low, high, 3)) == verdict


def test_one_seed_leaves_a_claim_undecided():
    assert decide(a_claim(above=1.0), Interval(2.0, 2.0, 2.0, 1)) == UNDECIDED
    assert decide(a_claim(above=1.0), None) == NOT_RUN


@pytest.fixture
def results(tmp_path):
    worklist = Worklist(["noise-put-back", "loss-hessian"], "smoke", seeds=2)
    records = Records(tmp_path)
    for name, ppl in (("drop-1", 70.0), ("drop-4", 77.0), ("drop-4-resampled", 70.7)):
        for seed in (1, 2):
            records.add(fake_record(worklist.cells[f"ptb:{name}"].run(0, seed), [ppl + seed]))
    return Results(worklist, records)


def test_verdicts_have_the_ratio_its_interval_and_the_papers_number(results):
    worse, matches = verdicts(experiment("noise-put-back"), results)
    assert worse.verdict == matches.verdict == HOLDS
    assert worse.seeds == 2
    assert worse.low < worse.estimate < worse.high
    assert worse.estimate == pytest.approx(math.sqrt(78 / 71 * 79 / 72))
    assert worse.measured == "best validation perplexity: Drop₄ / Drop₁"
    assert worse.asked == "> 1"
    assert matches.asked == "0.98 – 1.02"


def test_a_claim_without_records_is_not_run_and_has_the_papers_number(results):
    identity = verdicts(experiment("loss-hessian"), results)[0]
    assert (identity.verdict, identity.seeds, identity.estimate) == (NOT_RUN, 0, None)
    assert identity.paper == pytest.approx(108.76 / 84.52)


def test_only_a_claim_that_does_not_hold_has_a_reason(results):
    worse = replace(experiment("noise-put-back").claims[0], reasons={"smoke": "Too small."})
    opposite = replace(worse, numerator=worse.denominator, denominator=worse.numerator)
    found = verdicts(replace(experiment("noise-put-back"), claims=(worse, opposite)), results)
    assert [verdict.verdict for verdict in found] == [HOLDS, DOES_NOT_HOLD]
    assert [verdict.reason for verdict in found] == ["", "Too small."]


def test_verdicts_are_json_with_stable_keys(results):
    found = json.loads(json.dumps(as_json(verdicts(experiment("loss-hessian"), results))))
    needed = {"claim", "experiment", "verdict", "seeds", "estimate", "low", "high", "paper"}
    assert all(needed <= set(verdict) for verdict in found)
