import subprocess
import sys

import pytest

from undrop.errors import RunError
from undrop.lab.train import RunFolder

HOLD_LOCK = """
import sys
from undrop.lab.train.folder import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path):
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout.readline() == b"locked\n"
    folder = RunFolder(tmp_path)
    assert folder.holder() == str(first.pid)
    with pytest.raises(RunError, match=f"is in use by process {first.pid}:"), folder.locked():
        pass
    with pytest.raises(RunError, match=f"is in use by process {first.pid}:"):
        folder.refuse_if_used()
    first.kill()
    first.communicate()
    assert folder.holder() is None
    with folder.locked():
        pass


def test_metrics_are_truncated_to_the_length_of_the_checkpoint(tmp_path):
    metrics = RunFolder(tmp_path).metrics
    metrics.append({"a": 1})
    length = metrics.sync()
    metrics.append({"a": 2})
    with metrics.path.open("a") as file:
        file.write('{"a": ')  # a killed process can leave such a line
    assert metrics.read() == [{"a": 1}, {"a": 2}]
    metrics.truncate(length)
    assert metrics.read() == [{"a": 1}]
    with pytest.raises(RunError, match=r"metrics.jsonl was cut short: 99 bytes were written"):
        metrics.truncate(99)
    metrics.path.write_text("no json\n")
    with pytest.raises(RunError, match="is not a file of JSON lines"):
        metrics.read()


def test_a_folder_without_a_run_is_reported(tmp_path):
    with pytest.raises(RunError, match=r"holds no run: it has no config.json"):
        RunFolder(tmp_path).read_config()
    with pytest.raises(RunError, match="has no trained weights yet"):
        RunFolder(tmp_path).read_best()
    assert RunFolder(tmp_path).read_summary() is None


def test_temporary_files_of_a_killed_run_are_removed(tmp_path):
    folder = RunFolder(tmp_path)
    folder.checkpoints.folder.mkdir()
    for path in (tmp_path / "config.json.tmp", folder.checkpoints.folder / ".tmpAbC"):
        path.write_text("half")
    (tmp_path / "config.json").write_text("{}")
    folder.remove_leftovers()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoints", "config.json"]
