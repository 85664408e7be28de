"""Records are written once, found by their key, and refused when they are damaged."""

import json

import pytest

from fake_records import fake_record
from undrop.errors import RunError
from undrop.lab.reproduce.records import Records
from undrop.lab.reproduce.worklist import Worklist


@pytest.fixture
def run(worklist):
    return worklist.cells["ptb:analytic"].run(0, 1)


def test_a_record_is_read_as_it_was_written(tmp_path, run):
    record = fake_record(run, [3.0, 2.0])
    Records(tmp_path / "new").add(record)
    assert Records(tmp_path / "new").get(run.key) == record
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"{run.key[:16]}.json"]


def test_a_record_is_never_overwritten(tmp_path, run):
    Records(tmp_path).add(fake_record(run, [2.0]))
    records = Records(tmp_path)
    records.add(fake_record(run, [1.0]))
    assert records.get(run.key).best_valid_ppl == 2.0
    assert Records(tmp_path).get(run.key).best_valid_ppl == 2.0


def test_runs_with_different_seeds_or_methods_have_different_keys(worklist):
    cell = worklist.cells["ptb:analytic"]
    assert cell.run(0, 1).key != cell.run(0, 2).key
    assert cell.run(0, 1).key != worklist.cells["ptb:drop-1"].run(0, 1).key


def test_the_folder_of_the_corpus_does_not_change_the_key_of_a_run(run):
    elsewhere = Worklist(["replace-dropout"], "smoke", 2, data_dir="/there").cells["ptb:analytic"]
    assert elsewhere.run(0, 1).config.data.dir == "/there"
    assert elsewhere.run(0, 1).key == run.key


def test_a_probe_changes_the_key_of_a_run():
    worklist = Worklist(["taylor"], "smoke", seeds=1)
    assert worklist.cells["ptb-taylor:drop-1"].run(0, 1).key.endswith("-taylor")


def test_the_old_name_of_the_evaluation_times_is_still_read(tmp_path, run):
    record = json.loads(fake_record(run, [2.0]).model_dump_json())
    record["curve"]["judging"] = record["curve"].pop("evaluation")
    (tmp_path / "old.json").write_text(json.dumps(record))
    assert Records(tmp_path).get(run.key).curve.evaluation == [0.25]


def test_a_record_without_a_newer_option_is_still_found(tmp_path, run):
    record = fake_record(run, [2.0])
    old = json.loads(record.model_dump_json())
    del old["config"]["objective"]["interval"]
    old["key"] = "0" * 64
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert Records(tmp_path).get(run.key) is not None


def test_a_record_with_an_option_that_no_longer_exists_is_stale(tmp_path, run):
    old = json.loads(fake_record(run, [2.0]).model_dump_json())
    old["config"]["objective"]["color"] = "red"
    (tmp_path / "old.json").write_text(json.dumps(old))
    records = Records(tmp_path)
    assert len(records) == 0
    assert records.stale == [tmp_path / "old.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a JSON file, or it was truncated or modified"),
        (
            '{"config": {}}',
            "is not a record, because its 'probe' is missing or wrong: delete the file",
        ),
    ],
)
def test_a_damaged_record_is_refused_by_its_path(tmp_path, text, message):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(RunError, match=message):
        Records(tmp_path)
