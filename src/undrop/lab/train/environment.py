"""The processes, device, precision, threads and signals of a run."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from undrop.errors import ConfigError
from undrop.lab.models import LanguageModel
from undrop.objectives import Objective, Step
from undrop.torch_compat import portable_lstm

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from undrop.lab.train.config import TrainConfig


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",  # a RuntimeError on the CPU
    "out of memory",
    "storage size calculation overflowed",
    "overflow when unpacking",  # a TypeError
)


def find_device(name: str, setting: str = "train.device") -> torch.device:
    """Return the device of that name.

    Args:
        name: "cpu", "cuda", "mps", or "auto" for the fastest device of this machine.
        setting: the name of the setting or option, for the error message.

    Raises:
        ConfigError: if this machine has no such device.
    """
    mps = torch.backends.mps.is_available()
    usable = {"cuda": torch.cuda.is_available(), "mps": mps, "cpu": True}
    available = [device for device in usable if usable[device]]  # the fastest first
    if name == "auto":
        return torch.device(available[0])
    if name not in available:
        names = ", ".join(available)
        raise ConfigError(f"{setting} is {name!r}, but this machine has only {names}.")
    return torch.device(name)


@contextlib.contextmanager
def autocast(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Autocast to bfloat16 within the block, if the config asks for it."""
    if config.precision != "bfloat16":
        yield
        return
    with torch.autocast(device.type, torch.bfloat16), portable_lstm():
        yield


@contextlib.contextmanager
def torch_settings(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Set the number of threads and, on a GPU, deterministic algorithms; restore both at the end."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


class Interrupts:
    """A signal handler that remembers which signal asked the process to stop."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; the second one interrupts the process immediately."""
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)


@contextlib.contextmanager
def catch_signals() -> Iterator[Interrupts]:
    """Turn Ctrl-C and SIGTERM into a request to stop after the current step.

    Only the main thread can handle signals; in another thread, no signal is received.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    previous = {number: signal.signal(number, interrupts) for number in _SIGNALS}
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory ran out, or a size that no memory can hold."""
    text = str(error).lower()
    if any(message in text for message in _OUT_OF_MEMORY_MESSAGES):
        return True
    return isinstance(error, MemoryError | OverflowError | torch.OutOfMemoryError)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a result."""
    packages = {name: version(name) for name in ("undrop", "torch", "numpy")}
    return {"python": platform.python_version(), **packages}


def machine(device: torch.device | str, processes: int = 1) -> dict[str, Any]:
    """Return a description of this machine and of the part of it that a run uses."""
    return {
        "platform": platform.platform(),
        "device": str(device),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
    }


_CPU = torch.device("cpu")
_POLL_INTERVAL = 0.005  # seconds between two checks of the store


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

    def columns(self, count: int) -> slice:
        """Return this process's columns of a batch; two processes differ by at most one in number."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def all_reduce(self, values: list[float]) -> list[float]:
        """Sum each value over all processes."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def any(self, value: bool) -> bool:
        """Return whether the value is true in any process."""
        return self.all_reduce([float(value)])[0] > 0.0

    def broadcast(self, value: int) -> int:
        """Return the main process's value in every process."""
        return int(self.all_reduce([float(value) if self.is_main else 0.0])[0])

    def gather(self, tree: Any) -> list[Any]:
        """Return the trees of all processes, ordered by rank."""
        if self.size == 1:
            return [tree]
        trees: list[Any] = [None] * self.size
        dist.all_gather_object(trees, tree_map_only(Tensor, Tensor.cpu, tree))
        return trees


def is_main() -> bool:
    """Return whether this process writes and prints, even before ``join_world``."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def join_world(device: torch.device) -> Iterator[World]:
    """Join the processes that ``torchrun`` started; without torchrun, the world is this process."""
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
        # Give gloo's threads time to free their tensors: destroying the group does not wait for them,
        # and a thread that frees a tensor while the interpreter shuts down aborts the process.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def new_prefix_store(store: Store, rank: int, size: int, wait: timedelta | None = None) -> Store:
    """Return an empty section of the store that only the processes of this launch use.

    ``torchrun`` keeps one store across restarts. It still contains the addresses of killed processes,
    and a process that reads one of them waits for the killed process (pytorch issue 135712). So each
    launch uses a section with a new random name, which the main process picks. Every other process asks
    for the name with a random token of its own, because an answer to a new token can't come from an
    earlier launch.

    Args:
        store: the store of ``torchrun``.
        rank: the rank of this process.
        size: the number of processes.
        wait: how long to wait for the other processes; by default torch's own timeout.

    Raises:
        TimeoutError: in the main process, if a process did not ask for the name in time.
        torch.distributed.DistStoreError: in another process, if the main process did not answer.
    """
    from torch.distributed.distributed_c10d import PrefixStore, default_pg_timeout

    wait = wait or default_pg_timeout
    name = _offer_name(store, size, wait) if rank == 0 else _ask_for_name(store, rank, wait)
    return PrefixStore(name, store)


def _offer_name(store: Store, size: int, wait: timedelta) -> str:
    """Pick a name, and answer requests until every other process has confirmed the name."""
    name, missing = uuid.uuid4().hex, set(range(1, size))
    deadline = time.monotonic() + wait.total_seconds()
    while missing:
        for rank in missing:
            if store.check([f"undrop/asks/{rank}"]):
                token = store.get(f"undrop/asks/{rank}").decode()
                store.set(f"undrop/answer/{token}", name)
        missing = {rank for rank in missing if not store.check([f"undrop/{name}/{rank}"])}
        if missing and time.monotonic() > deadline:
            ranks = sorted(missing)
            raise TimeoutError(f"of {size} processes, ranks {ranks} did not start in time.")
        time.sleep(_POLL_INTERVAL)
    return name


def _ask_for_name(store: Store, rank: int, wait: timedelta) -> str:
    """Ask the main process for the name, confirm it, and return it."""
    token = uuid.uuid4().hex
    store.set(f"undrop/asks/{rank}", token)
    store.wait([f"undrop/answer/{token}"], wait)
    name = store.get(f"undrop/answer/{token}").decode()
    store.set(f"undrop/{name}/{rank}", "")
    return name


class _ObjectiveModule(nn.Module):
    """An objective as a module: DDP needs all passes of a step in one ``forward``."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, inputs: Any, targets: Tensor) -> tuple[Step, Tensor]:
        step: Step = self.objective(self.model, inputs, targets)
        return step, step.total  # DDP returns both as they are


class Gradient:
    """Computes the gradient of a step, averaged over all processes, and stores it in ``.grad``.

    With several processes, a step is one forward and one backward pass of DDP, which holds the graphs of
    all samples at the same time. A single process holds one graph at a time.
    """

    def __init__(self, model: LanguageModel, objective: Objective, world: World) -> None:
        self._model, self._objective = model, objective
        self._parallel: nn.Module | None = None
        if world.size > 1:
            module = _ObjectiveModule(model, objective)
            devices = [world.device] if world.device.type == "cuda" else None
            self._parallel = DistributedDataParallel(module, device_ids=devices)

    def __call__(self, inputs: Any, targets: Tensor) -> Step:
        """Run the forward and the backward pass, and return the step."""
        step: Step
        if self._parallel is None:
            step = self._objective(self._model, inputs, targets)
            step.backward()
        else:
            step, total = self._parallel(inputs, targets)
            total.backward()
        return step
