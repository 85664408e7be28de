"""The processes that train one model together (``torchrun``), or just this one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from undrop.tensor_files import from_bytes, to_bytes

__all__ = ["World", "is_main", "joined"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """This process's place among all, and what they tell each other."""

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def share(self, columns: int) -> slice:
        """This process's part of the columns of a batch, as equal as can be."""
        return slice(self.rank * columns // self.size, (self.rank + 1) * columns // self.size)

    def sums(self, values: list[float]) -> list[float]:
        """The sum of each value over all processes."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def any(self, value: bool) -> bool:
        """Whether the value is true in any process."""
        return self.sums([float(value)])[0] > 0.0

    def from_main(self, value: int) -> int:
        """The main process's value, in all processes."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.broadcast(tensor, src=0)
        return int(tensor)

    def gather(self, tree: Any) -> list[Any]:
        """The trees of all processes, by rank."""
        if self.size == 1:
            return [tree]
        data = to_bytes(tree).to(self.device)
        length = torch.tensor(len(data), device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        longest = max(int(n) for n in lengths)
        parts = [data.new_empty(longest) for _ in range(self.size)]
        dist.all_gather(parts, F.pad(data, (0, longest - len(data))))
        return [from_bytes(part[: int(n)]) for part, n in zip(parts, lengths, strict=True)]


def is_main() -> bool:
    """Whether this is the process that writes and speaks, also before and after it has joined."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[World]:
    """Join the processes that ``torchrun`` started; be alone if it did not."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(device=device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    from undrop.lab.train.rendezvous import meet  # needs what not every build of torch has

    store, rank, size = meet()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size, device)
        # Meanwhile gloo's threads let go of the last tensors. One that does so when the interpreter
        # is at its end aborts the process, and destroying the group does not wait for them.
        dist.barrier()
    finally:
        dist.destroy_process_group()
