"""Where processes that ``torchrun`` started, or started again, find each other."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

__all__ = ["fresh", "meet"]


def meet() -> tuple[Store, int, int]:
    """A store that only the processes of this start share, this one's rank, and their number."""
    store, rank, size = next(rendezvous("env://"))
    return fresh(store, rank, size), rank, size


def fresh(store: Store, rank: int, size: int, wait: timedelta = default_pg_timeout) -> Store:
    """A part of the store that holds nothing from an earlier start; the same one in all processes.

    ``torchrun`` keeps one store for all its restarts, and a process that finds there the address of
    one that was killed waits for it (pytorch issue 135712). So the main process makes up a name, and
    every other one asks for it by a word of its own, to which nothing of before can be the answer.

    Raises:
        TimeoutError: in the main process, if not all others have come in the time to wait.
        torch.distributed.DistStoreError: in another one, if the main process has not.
    """
    name = _told(store, size, wait) if rank == 0 else _heard(store, rank, wait)
    return PrefixStore(name, store)


def _told(store: Store, size: int, wait: timedelta) -> str:
    """Make up a name and answer whoever asks, until every other process has heard it."""
    name, missing = uuid.uuid4().hex, set(range(1, size))
    deadline = time.monotonic() + wait.total_seconds()
    while missing:
        for rank in [rank for rank in missing if store.check([f"undrop/asks/{rank}"])]:
            store.set(f"undrop/answer/{store.get(f'undrop/asks/{rank}').decode()}", name)
        missing = {rank for rank in missing if not store.check([f"undrop/{name}/{rank}"])}
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"of {size} processes, ranks {sorted(missing)} did not come.")
        time.sleep(0.005)
    return name


def _heard(store: Store, rank: int, wait: timedelta) -> str:
    """Ask for the name and say that it was heard."""
    word = uuid.uuid4().hex
    store.set(f"undrop/asks/{rank}", word)
    store.wait([f"undrop/answer/{word}"], wait)
    name = store.get(f"undrop/answer/{word}").decode()
    store.set(f"undrop/{name}/{rank}", "")
    return name
