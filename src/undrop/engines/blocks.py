"""Tensors that have a different value in each block of a stacked batch.

All examples share noise on a weight (DropConnect) or on an embedding row. The rows without noise use
W, the others W ⊙ (1 ± ε₀·σ·η): three weights in one pass. A function of such a weight and of
activations is called once per block, with the rows and the weight of that block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class BlockTensor(Tensor):
    """A tensor that represents one value per block; ``blocks`` holds the values."""

    blocks: Sequence[Tensor]

    @staticmethod
    def of(blocks: Sequence[Tensor]) -> BlockTensor:
        """Return one tensor for all blocks; it has the shape and type of the first."""
        made: BlockTensor = blocks[0].detach().as_subclass(BlockTensor)
        made.blocks = blocks
        return made


def has_blocks(args: Any) -> bool:
    """Return whether an argument, or an entry of a list among them, is a :class:`BlockTensor`."""
    return any(
        type(a) is BlockTensor or (isinstance(a, (list, tuple)) and has_blocks(a)) for a in args
    )


def blockwise(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: Sequence[int],
    batch_dim: Callable[[Tensor], int | None],
) -> Any:
    """Call a function that treats rows independently once per block, and join the results.

    ``sizes`` are the numbers of rows of the blocks, and ``batch_dim`` returns the batch dimension of a
    tensor, or None if it has none.
    """
    leaves, spec = tree_flatten((args, kwargs))
    dims = [
        batch_dim(x) if isinstance(x, Tensor) and type(x) is not BlockTensor else None
        for x in leaves
    ]
    outputs, start = [], 0
    with torch._C.DisableTorchFunctionSubclass():
        for block, size in enumerate(sizes):
            whole = (x.blocks[block] if type(x) is BlockTensor else x for x in leaves)
            own = [
                x if dim is None else x.narrow(dim, start, size)
                for x, dim in zip(whole, dims, strict=True)
            ]
            block_args, block_kwargs = tree_unflatten(own, spec)
            outputs.append(function(*block_args, **block_kwargs))
            start += size
        batched = any(dim is not None for dim in dims)
        return _joined(outputs, sizes, batched, next((d for d in dims if d is not None), 0))


def _joined(outputs: list[Any], sizes: Sequence[int], batched: bool, first: int) -> Any:
    """Join the results of the blocks: along the batch, or as blocks if no argument has a batch."""
    flats, specs = zip(*(tree_flatten(out) for out in outputs), strict=True)
    joined: list[Any] = []
    for parts in zip(*flats, strict=True):
        if not isinstance(parts[0], Tensor):
            joined.append(parts[0])
        elif batched:
            joined.append(torch.cat(parts, _joined_dim(parts, sizes, first)))
        else:
            joined.append(BlockTensor.of(parts))
    return tree_unflatten(joined, specs[0])


def _joined_dim(parts: Sequence[Tensor], sizes: Sequence[int], first: int) -> int:
    """Return the dimension that has the block's size in every part; ``first`` if there are several."""
    fits = [
        d
        for d in range(parts[0].dim())
        if all(part.shape[d] == size for part, size in zip(parts, sizes, strict=True))
    ]
    return first if first in fits else fits[0] if fits else 0
