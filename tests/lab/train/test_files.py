import os
from pathlib import Path

import pytest

from undrop.errors import RunError
from undrop.files import check_writable, read_json, replacing, write_json


def test_a_file_is_replaced_completely_and_no_temporary_file_is_left(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    write_json(path, {"new": "ü"})
    assert read_json(path) == {"new": "ü"}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_failure_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(TypeError), replacing(path) as temporary:
        temporary.write_bytes("half of it is no bytes")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_a_full_disk_is_reported_in_one_sentence_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with (
        pytest.raises(
            RunError, match=r"the disk is full: .*a could not be written; nothing .* lost"
        ),
        replacing(path),
        open("/dev/full", "w") as full,
    ):
        full.write("x" * 100_000)
    assert path.read_text() == "old"


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="can't be written: not a directory"):
        write_json(tmp_path / "file" / "a.json", 1)


@pytest.mark.parametrize("name", [".", "..", "folder"])
def test_a_folder_in_place_of_a_file_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="can't be written: it is a folder; give the name of a file"):
        write_json(Path(name), 1)


def test_unwritable_paths_are_reported_before_any_work(tmp_path, monkeypatch):
    check_writable(tmp_path / "a.json")
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "file")
    with pytest.raises(RunError, match=r"can't be written: there is no folder .*file"):
        check_writable(tmp_path / "file" / "a.json")
    with pytest.raises(RunError, match="can't be written: it is a folder"):
        check_writable(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(RunError, match=r"a\.json can't be written: permission denied"):
        check_writable(tmp_path / "a.json")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("text", ["", "{", "\x00", '{"a": ', "[" * 100_000])
def test_an_invalid_or_missing_json_file_is_named(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(RunError, match=r"a.json is not a JSON file"):
        read_json(path)
    with pytest.raises(RunError, match="can't be read: no such file"):
        read_json(tmp_path / "b.json")
