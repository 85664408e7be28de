"""Kill one of two workers under torchrun: the agent ends the other one, and both resume when restarted.

In half of the strikes the agent restarts the workers, and in the other half a new launch does.
"""

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

from faults.lab import SHORT_RUN, Lab, campaign
from undrop.lab import train
from undrop.lab.train import Config

WORKERS = 2


def work(config: dict[str, Any], out: str) -> None:
    """Train in one worker, which gets its rank from the environment."""
    Path(f"{out}.rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    Path(f"{out}.restarts").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
    train.run(Config.parse(config), out=out, resume=True)


def launch(config: Config, out: Path, restarts: int = 0) -> None:
    """Train under the agent of torchrun, with workers that are forked, because that is faster."""
    logs = DefaultLogsSpecs(str(out.parent / "logs"), redirects=Std.ALL)
    options = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=WORKERS,
        run_id=out.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.02,
        start_method="forkserver",
        logs_specs=logs,
    )
    elastic_launch(options, work)(config.as_dict(), str(out))


def kill_worker(lab: Lab, out: Path, draw: Random) -> int:
    """Send SIGKILL to one of the workers, at a random moment after its start."""
    rank, delay = draw.randrange(WORKERS), draw.uniform(0.0, lab.seconds)
    restarts, finished = draw.randrange(2), threading.Event()
    pid_file = Path(f"{out}.rank-{rank}")
    pid_file.unlink(missing_ok=True)

    def strike() -> None:
        while not pid_file.exists() and not finished.is_set():
            time.sleep(0.005)
        # The agent would wait forever for a worker that is killed after it has finished.
        if not finished.wait(delay) and not lab.ended(out):
            with contextlib.suppress(ProcessLookupError):  # the worker has ended
                os.kill(int(pid_file.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=strike)
    thread.start()
    failed = False
    try:
        launch(lab.config, out, restarts)
    except ChildFailedError:
        failed = True
    finished.set()
    thread.join()
    assert not (failed and restarts), "the restarted workers did not continue the run"
    return failed or Path(f"{out}.restarts").read_text() != "0"


def kill_torchrun_worker(folder: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill workers; return (kills that hit, kills survived)."""
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    lab = Lab(folder, SHORT_RUN, launch)
    return campaign(lab, kill_worker, times, seed)
