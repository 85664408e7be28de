"""The format of checkpoints: nested Python values as JSON and named tensors, and back."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrop.errors import CheckpointError

_TENSOR, _TUPLE, _ITEMS, _TREE = "$tensor", "$tuple", "$items", "$tree"


def pack(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a value into JSON and tensors; the JSON names each tensor.

    :func:`unpack` restores dictionaries (with keys of any plain type), lists, tuples, tensors,
    numbers, strings, booleans and None. A tensor that occurs twice, such as a tied weight, is stored
    once.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            name = names.setdefault(_identity(value), path)
            if name == path:
                tensors[path] = with_own_storage(value)
            return {_TENSOR: name}
        if isinstance(value, dict):
            return _pack_dict(value, path, visit)
        if isinstance(value, list | tuple):
            items = [visit(item, f"{path}/{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {_TUPLE: items}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"a checkpoint can't hold a {type(value).__name__} (at {path or '/'})")

    return visit(tree, ""), tensors


def _pack_dict(value: dict[Any, Any], path: str, visit: Any) -> Any:
    """Return a JSON object, or a list of items if a key is not a string or starts with $."""
    packed = [(key, visit(item, f"{path}/{key}")) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in packed):
        return dict(packed)
    return {_ITEMS: [[visit(key, path), item] for key, item in packed]}


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same data in memory."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)


def with_own_storage(tensor: Tensor) -> Tensor:
    """Return the tensor in main memory, contiguous, and copied if it is a part of a larger storage."""
    tensor = tensor.detach().cpu().contiguous()
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if is_whole else tensor.clone()


def unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """Restore the value that :func:`pack` split; a missing tensor raises a ``CheckpointError``."""
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if _TENSOR in packed:
        if packed[_TENSOR] not in tensors:
            raise CheckpointError(f"the tensor {packed[_TENSOR]!r} is missing.")
        return tensors[packed[_TENSOR]]
    if _TUPLE in packed:
        return tuple(unpack(item, tensors) for item in packed[_TUPLE])
    if _ITEMS in packed:
        return dict(unpack(pair, tensors) for pair in packed[_ITEMS])
    return {key: unpack(value, tensors) for key, value in packed.items()}


def to_bytes(tree: Any) -> Tensor:
    """Return a value as a one-dimensional tensor of bytes, to send to another process."""
    import safetensors.torch

    packed, tensors = pack(tree)
    tensors[_TREE] = torch.frombuffer(bytearray(json.dumps(packed).encode()), dtype=torch.uint8)
    return torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:
    """Restore the value that :func:`to_bytes` was called with."""
    import safetensors.torch

    tensors = safetensors.torch.load(data.cpu().numpy().tobytes())
    packed = json.loads(tensors.pop(_TREE).numpy().tobytes())
    return unpack(packed, tensors)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a safetensors file; a full disk raises an ``OSError``, like any other write."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
        path.chmod(0o644)  # otherwise only the owner could read the file
    except SafetensorError as error:
        # safetensors has the error number of the operating system only in its message.
        for number in (errno.ENOSPC, errno.EDQUOT):
            if f"os error {number}" in str(error):
                raise OSError(number, os.strerror(number)) from error
        raise OSError(errno.EIO, str(error)) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raise a ``CheckpointError`` if it is missing, truncated or modified."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist.") from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} was truncated or modified: {error}.") from error
