"""A worker killed under torchrun: its agent ends the other one; started again, they go on."""

import contextlib
import logging
import os
import signal
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from faults.lab import SHORT, Lab, campaign
from undrop import train
from undrop.train import Config

WORKERS = 2


def work(config: dict[str, Any], out: str) -> None:
    """What each worker does; the agent told it its rank by the environment."""
    Path(f"{out}.rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    train.run(Config.parse(config), out=out, resume=True)


def launch(config: Config, out: Path) -> None:
    """Train under the agent of torchrun, whose workers are forked here, not started from nothing."""
    logs = DefaultLogsSpecs(str(out.parent / "logs"), redirects=Std.ALL)
    options = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=WORKERS,
        run_id=out.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.02,
        start_method="forkserver",
        logs_specs=logs,
    )
    elastic_launch(options, work)(config.as_dict(), str(out))


def kill_worker(lab: Lab, out: Path, draw: Random) -> int:
    """SIGKILL to one of the workers, at any moment after the run was begun."""
    rank, delay = draw.randrange(WORKERS), draw.uniform(0.0, lab.seconds)
    over, hit = threading.Event(), threading.Event()

    def strike() -> None:
        while train.RunFolder(out).holder() is None and not over.is_set():
            time.sleep(0.005)
        if not over.wait(delay):
            hit.set()
            with contextlib.suppress(ProcessLookupError):  # it was over before
                os.kill(int(Path(f"{out}.rank-{rank}").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=strike)
    thread.start()
    failed = False
    try:
        launch(lab.config, out)
    except ChildFailedError:
        failed = True
    over.set()
    thread.join()
    assert hit.is_set() or not failed
    return failed


def kill_torchrun_worker(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill workers so many times; (kills that hit, those survived)."""
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    lab = Lab(folder, SHORT, launch)
    return campaign(lab, kill_worker, times, seed)
