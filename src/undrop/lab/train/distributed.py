"""Training in several processes that ``torchrun`` starts, or in just one."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from undrop.lab.models import LanguageModel
from undrop.objectives import Objective, Step
from undrop.tensor_files import from_bytes, to_bytes

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_CPU = torch.device("cpu")
_POLL = 0.005  # seconds between two checks of the store


@dataclass(frozen=True)
class World:
    """The processes that train one model, seen from one of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def share(self, columns: int) -> slice:
        """Return this process's columns of a batch; the shares differ by at most one column."""
        return slice(self.rank * columns // self.size, (self.rank + 1) * columns // self.size)

    def sums(self, values: list[float]) -> list[float]:
        """Sum each value over all processes."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def any(self, value: bool) -> bool:
        """Return whether the value is true in any process."""
        return self.sums([float(value)])[0] > 0.0

    def from_main(self, value: int) -> int:
        """Return the main process's value in every process."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.broadcast(tensor, src=0)
        return int(tensor)

    def gather(self, tree: Any) -> list[Any]:
        """Return the trees of all processes, ordered by rank."""
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
    """Return whether this process writes and prints; works before joining and after leaving, too."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def join_world(device: torch.device) -> Iterator[World]:
    """Join the processes that ``torchrun`` started; without torchrun, train in this process alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(device=device)
        return
    from torch.distributed.rendezvous import rendezvous  # not in every build of torch

    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://"))
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = new_prefix_store(store, rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        yield World(rank, size, device)
        # This gives gloo's threads time to free the last tensors. A thread that frees one while the
        # interpreter shuts down aborts the process, and destroying the group does not wait.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def new_prefix_store(store: Store, rank: int, size: int, wait: timedelta | None = None) -> Store:
    """Return an empty section of the store that only the processes of this start share.

    ``torchrun`` keeps one store across restarts, and a process that finds the address of a killed
    process in it waits for that process (pytorch issue 135712). So the main process picks a new random
    name, and every other process requests it with a random token of its own, which no earlier start
    can have answered.

    Args:
        store: the store of ``torchrun``.
        rank: the rank of this process.
        size: the number of processes.
        wait: how long to wait for the others; by default torch's own timeout.

    Raises:
        TimeoutError: in the main process, if a process did not ask in time.
        torch.distributed.DistStoreError: in another process, if the main process did not answer.
    """
    from torch.distributed.distributed_c10d import PrefixStore, default_pg_timeout

    wait = wait or default_pg_timeout
    name = _offer_name(store, size, wait) if rank == 0 else _ask_for_name(store, rank, wait)
    return PrefixStore(name, store)


def _offer_name(store: Store, size: int, wait: timedelta) -> str:
    """Pick a name and answer every request, until all other processes confirm it."""
    name, missing = uuid.uuid4().hex, set(range(1, size))
    deadline = time.monotonic() + wait.total_seconds()
    while missing:
        for rank in [rank for rank in missing if store.check([f"undrop/asks/{rank}"])]:
            store.set(f"undrop/answer/{store.get(f'undrop/asks/{rank}').decode()}", name)
        missing = {rank for rank in missing if not store.check([f"undrop/{name}/{rank}"])}
        if missing and time.monotonic() > deadline:
            raise TimeoutError(
                f"of {size} processes, ranks {sorted(missing)} did not start in time."
            )
        time.sleep(_POLL)
    return name


def _ask_for_name(store: Store, rank: int, wait: timedelta) -> str:
    """Ask for the name and confirm it."""
    token = uuid.uuid4().hex
    store.set(f"undrop/asks/{rank}", token)
    store.wait([f"undrop/answer/{token}"], wait)
    name = store.get(f"undrop/answer/{token}").decode()
    store.set(f"undrop/{name}/{rank}", "")
    return name


class _ObjectiveModule(nn.Module):
    """An objective as a module, so that DDP sees all passes of a step as one forward."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.step: Step | None = None

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        self.step = self.objective(self.model, inputs, targets)
        return self.step.total


class Gradient:
    """Computes the gradient of a step, averaged over all processes, into ``.grad``.

    With several processes the step is one forward and one backward of DDP, which holds the graphs of
    all its samples at once. A single process holds one graph at a time.
    """

    def __init__(self, model: LanguageModel, objective: Objective, world: World) -> None:
        self._model = model
        self._objective = objective
        self._module: _ObjectiveModule | None = None
        if world.size > 1:
            self._module = _ObjectiveModule(model, objective)
            devices = [world.device] if world.device.type == "cuda" else None
            self._parallel = DistributedDataParallel(self._module, device_ids=devices)

    def __call__(self, inputs: Any, targets: Tensor) -> Step:
        """Run the forward and the backward pass, and return the step."""
        if self._module is None:
            step: Step = self._objective(self._model, inputs, targets)
            step.backward()
            return step
        self._parallel(inputs, targets).backward()
        done, self._module.step = self._module.step, None
        assert done is not None
        return done
