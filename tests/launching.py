"""Starting a script or a module in several processes with torchrun, as a user does."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def launch(*words: object, processes: int = 2) -> str:
    """Run a script's path, or ``-m`` and a module, under torchrun; return what the first process prints.

    Each process writes to a file of its own: lines of two processes in one file may mix. With torch 2.8,
    gloo prints that its processes are connected, which is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={processes}", f"--log-dir={folder}", "--redirects=3"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*command, *map(str, words)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        printed = {path: path.read_text() for path in sorted(Path(folder).rglob("*.log"))}
        assert done.returncode == 0, "\n".join([done.stderr, *printed.values()])
        attempts = [text for path, text in printed.items() if path.match("0/stdout.log")]
    lines = attempts[-1].splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))
