"""Tensors that have a different value in each block of a stacked batch.

With noise on a weight W (DropConnect) or on an embedding row, a stacked pass needs several weights:
W ⊙ (1 + ε₀·σ·η) for the rows at +ε₀, W ⊙ (1 - ε₀·σ·η) for those at -ε₀, and with ``exact_output`` W for
the rows without noise. A function of such a weight and of activations is called once per block, with the
weight and the rows of that block. ``Layout.of`` says which rows form a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from undrop.engines.layout import Layout


class BlockTensor(Tensor):
    """A tensor with one value per block; ``blocks`` holds the values."""

    blocks: Sequence[Tensor]

    @staticmethod
    def of(blocks: Sequence[Tensor]) -> BlockTensor:
        """Return a tensor with these values, and with the shape and type of the first."""
        tensor: BlockTensor = blocks[0].detach().as_subclass(BlockTensor)
        tensor.blocks = blocks
        return tensor

    @staticmethod
    def noisy(h: Tensor, noise: Tensor, layout: Layout) -> BlockTensor:
        """Return h ⊙ (1 ± noise), and before them h itself if the rows without noise are a block."""
        change = h * noise.to(h)
        blocks = (h + change, h - change)
        return BlockTensor.of((h, *blocks) if len(layout.blocks) == 3 else blocks)


def has_blocks(args: Any) -> bool:
    """Return whether an argument, or an entry of a list or tuple, is a :class:`BlockTensor`."""
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

    Args:
        function: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        sizes: the number of rows of each block.
        batch_dim: returns the batch dimension of a tensor, or None if it has none.
    """
    leaves, spec = tree_flatten((args, kwargs))
    dims = [
        batch_dim(x) if isinstance(x, Tensor) and type(x) is not BlockTensor else None
        for x in leaves
    ]
    outputs, start = [], 0
    with torch._C.DisableTorchFunctionSubclass():
        for block, size in enumerate(sizes):
            values = (x.blocks[block] if type(x) is BlockTensor else x for x in leaves)
            rows = [
                x if dim is None else x.narrow(dim, start, size)
                for x, dim in zip(values, dims, strict=True)
            ]
            block_args, block_kwargs = tree_unflatten(rows, spec)
            outputs.append(function(*block_args, **block_kwargs))
            start += size
        return _join(outputs, sizes, next((dim for dim in dims if dim is not None), None))


def _join(outputs: list[Any], sizes: Sequence[int], dim: int | None) -> Any:
    """Join the results of the blocks along the batch; ``dim`` is the batch dimension of the arguments.

    If no argument has a batch dimension, every result becomes a :class:`BlockTensor`.
    """
    flat_outputs, specs = zip(*(tree_flatten(out) for out in outputs), strict=True)
    joined: list[Any] = []
    for parts in zip(*flat_outputs, strict=True):
        if not isinstance(parts[0], Tensor):
            joined.append(parts[0])
        elif dim is None:
            joined.append(BlockTensor.of(parts))
        else:
            joined.append(torch.cat(parts, _dim_of_sizes(parts, sizes, dim)))
    return tree_unflatten(joined, specs[0])


def _dim_of_sizes(parts: Sequence[Tensor], sizes: Sequence[int], preferred: int) -> int:
    """Return a dimension along which the parts have these sizes, if possible ``preferred``."""
    dims = [d for d in range(parts[0].dim()) if [part.shape[d] for part in parts] == [*sizes]]
    return preferred if preferred in dims else dims[0] if dims else 0
