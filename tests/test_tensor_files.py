import json

import pytest
import torch

from undrop.errors import CheckpointError
from undrop.tensor_files import from_bytes, pack, to_bytes, unpack


def tree():
    base = torch.arange(6.0).view(2, 3)
    return {
        "numbers": [1, 2.5, True, None, "text"],
        "tuple": (torch.tensor(3, dtype=torch.int64), (base, ())),
        "by int": {0: {"step": torch.ones(())}, 1: "b"},
        "$odd key": 1,
        "view": base[:, 1],
        "empty": torch.zeros(0),
        "bytes": torch.tensor([1, 255], dtype=torch.uint8),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_packing_and_unpacking_restores_a_tree():
    packed, tensors = pack(tree())
    assert same(unpack(json.loads(json.dumps(packed)), tensors), tree())
    assert same(from_bytes(to_bytes(tree())), tree())


def test_a_tied_tensor_is_stored_once_and_a_view_separately():
    weight = torch.ones(2, 2)
    _, tensors = pack({"a": weight, "b": weight, "row": weight[0]})
    assert sorted(tensors) == ["/a", "/row"]
    assert tensors["/row"].untyped_storage().nbytes() == 8


def test_an_unsupported_value_is_refused_with_its_path():
    with pytest.raises(TypeError, match="can't hold a set \\(at /a/0\\)"):
        pack({"a": [{1}]})


def test_a_missing_tensor_of_a_checkpoint_is_named():
    packed, _ = pack({"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match="the tensor '/a' is missing"):
        unpack(packed, {})
