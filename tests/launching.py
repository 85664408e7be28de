"""Starting a script or a module in several processes with torchrun, as a user does."""

import os
import subprocess
import sys


def launch(*words: object, processes: int = 2) -> str:
    """Run a script's path, or ``-m`` and a module, under torchrun and return what it prints.

    With torch 2.8, gloo prints that its processes are connected, which is left out.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))
