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
    found = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        found.save(step, state(step))
    return found


def files(store, step):
    return store.path(step), next(store.folder.glob(f"step-{step:08d}.*.safetensors"))


def test_the_last_two_checkpoints_are_kept(store):
    assert store.steps() == [2, 3]
    assert len(os.listdir(store.folder)) == 4
    step, found = store.newest(pytest.fail)
    assert step == 3
    assert torch.equal(found["weight"], state(3)["weight"])


def test_a_run_without_checkpoints_has_no_newest_one(tmp_path):
    assert Checkpoints(tmp_path / "none").newest(pytest.fail) is None


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: len(data) // 2]
    elif how == "emptied":
        data = bytearray()
    elif how == "longer":
        data += b"x"
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("which", [0, 1], ids=["json", "tensors"])
@pytest.mark.parametrize("how", ["cut", "emptied", "longer", "changed", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(store, which, how):
    path = files(store, 3)[which]
    if how == "gone" and which == 0:
        pytest.skip("without its JSON there is no checkpoint")
    path.unlink() if how == "gone" else damage(path, how)
    told = []
    step, found = store.newest(told.append)
    assert (step, found["step"]) == (2, 2)
    assert len(told) == 1
    assert str(store.path(3)) in told[0]
    assert "is damaged" in told[0]
    store.save(4, state(4))
    assert store.steps() == [2, 4]  # the refused one does not count as kept


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
    """Make a checkpoint name another file, with a checksum that fits."""
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


@pytest.mark.parametrize("place", ["tensors", "json"])
def test_a_full_disk_loses_no_earlier_checkpoint(store, monkeypatch, place):
    def full(*args, **kwargs):
        if place == "tensors":
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    where = (safetensors.torch, "save_file") if place == "tensors" else (folder.json, "dumps")
    with monkeypatch.context() as patch:
        patch.setattr(*where, full)
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
