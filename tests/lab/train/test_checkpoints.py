import errno
import json
import os

import pytest
import safetensors.torch
import torch

from undrop.errors import CheckpointError, RunError
from undrop.lab.train import folder
from undrop.lab.train.folder import Checkpoints
from undrop.tensor_files import load_tensors


def state(value):
    return {"weight": torch.full((3,), float(value)), "step": value}


@pytest.fixture
def store(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        checkpoints.save(step, state(step))
    return checkpoints


def files(store, step):
    return store.path(step), next(store.folder.glob(f"step-{step:08d}.*.safetensors"))


def test_the_last_two_checkpoints_are_kept(store):
    assert store.steps() == [2, 3]
    assert len(os.listdir(store.folder)) == 4
    step, loaded = store.newest(pytest.fail)
    assert step == 3
    assert torch.equal(loaded["weight"], state(3)["weight"])


def test_without_checkpoints_none_is_the_newest(tmp_path):
    assert Checkpoints(tmp_path / "none").newest(pytest.fail) is None


def damage(path, kind):
    data = bytearray(path.read_bytes())
    if kind == "cut":
        data = data[: len(data) // 2]
    elif kind == "emptied":
        data = bytearray()
    elif kind == "extended":
        data += b"x"
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", [0, 1], ids=["json", "tensors"])
@pytest.mark.parametrize("kind", ["cut", "emptied", "extended", "changed", "deleted"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(store, file, kind):
    path = files(store, 3)[file]
    if kind == "deleted" and file == 0:
        pytest.skip("without its JSON there is no checkpoint")
    path.unlink() if kind == "deleted" else damage(path, kind)
    warnings = []
    step, loaded = store.newest(warnings.append)
    assert (step, loaded["step"]) == (2, 2)
    assert len(warnings) == 1
    assert str(store.path(3)) in warnings[0]
    assert "is damaged" in warnings[0]
    store.save(4, state(4))
    assert store.steps() == [2, 4]  # the damaged one does not count


def test_a_damaged_earlier_checkpoint_does_not_prevent_saving(store):
    damage(store.path(2), "cut")
    store.save(3, state(33))  # again, as when an epoch ends at a step that already has a checkpoint
    assert store.newest(pytest.fail)[1]["step"] == 33


def test_a_checkpoint_with_changed_json_is_refused(store):
    path = store.path(3)
    body = json.loads(path.read_text())
    body["state"]["step"] = 99
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=r"step-00000003.json is damaged: .* modified"):
        store.load(3)


def rename_tensors(store, name):
    """Replace the name of the tensor file in a checkpoint, and update the checksum."""
    path = store.path(3)
    body = json.loads(path.read_text())
    del body["check"]
    body["tensors"] = name
    path.write_text(json.dumps({**body, "check": folder._checksum(body)}))


def test_a_tensor_file_name_cannot_leave_the_folder(store, tmp_path):
    outside = tmp_path / "outside.safetensors"
    files(store, 3)[1].rename(outside)
    rename_tensors(store, "../outside.safetensors")
    with pytest.raises(CheckpointError, match="is damaged"):
        store.load(3)


@pytest.mark.parametrize("name", ["x" * 1000, "a\0b", "", ".."])
def test_an_impossible_tensor_file_name_is_refused(store, name):
    rename_tensors(store, name)
    with pytest.raises(CheckpointError, match="were truncated or modified"):
        store.load(3)


def test_an_error_says_that_no_intact_checkpoint_is_left(store):
    for step in (2, 3):
        damage(store.path(step), "cut")
    with pytest.raises(CheckpointError, match=r"no intact checkpoint is left .*: .*step-0000"):
        store.newest(lambda text: None)


@pytest.mark.parametrize("file", ["tensors", "json"])
def test_a_full_disk_loses_no_earlier_checkpoint(store, monkeypatch, file):
    def full(*args, **kwargs):
        if file == "tensors":
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = (safetensors.torch, "save_file") if file == "tensors" else (folder.json, "dumps")
    with monkeypatch.context() as patch:
        patch.setattr(*writer, full)
        with pytest.raises(RunError, match=r"the disk is full: .*step-00000004.* --resume"):
            store.save(4, state(4))
    assert store.steps() == [2, 3]
    assert store.newest(pytest.fail)[0] == 3
    assert not list(store.folder.glob("*.tmp"))
    store.save(4, state(4))
    assert store.steps() == [3, 4]
    assert len(os.listdir(store.folder)) == 4


def test_an_invalid_or_missing_tensor_file_is_named(tmp_path):
    (tmp_path / "a").write_bytes(b"no tensors here")
    with pytest.raises(CheckpointError, match="a was truncated or modified"):
        load_tensors(tmp_path / "a")
    with pytest.raises(CheckpointError, match="b does not exist"):
        load_tensors(tmp_path / "b")
