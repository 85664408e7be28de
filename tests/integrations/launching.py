"""Starting a script of the tests or the examples in two processes."""

import os
import subprocess
import sys
from pathlib import Path


def launch(script: Path, *arguments: str, processes: int = 2) -> str:
    """Run a script under torchrun on the CPU; its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
