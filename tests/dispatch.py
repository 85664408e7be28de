"""Dispatch modes that observe the operations of torch."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


class HostReads(TorchDispatchMode):
    """Lists the operations that wait for a device: those that read a value, or copy one to it."""

    NAMES = frozenset(
        {
            "_local_scalar_dense",
            "nonzero",
            "item",
            "is_nonzero",
            "masked_select",
            "unique",
            "lift_fresh",
        }
    )

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in self.NAMES or (
            name in ("index", "index_put_", "index_put") and self._masks(args)
        ):
            self.found.append(name)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _masks(args):
        """Whether an index is a boolean mask; torch must read the number of its entries."""
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
