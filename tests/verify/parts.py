"""The parts of a report: each returns plain values for JSON."""

import contextlib
import io
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from undrop.lab.bench import bench
from undrop.lab.train import configure, train_interleaved
from undrop.lab.train.environment import machine as describe
from undrop.lab.train.environment import versions
from undrop.report import Progress

TESTS = Path(__file__).parents[1]
MATHS = (
    "test_noise.py",
    "engines/test_exact.py",
    "engines/test_reverse.py",
    "engines/test_tangent.py",
    "engines/test_stacked.py",
    "engines/test_fraction.py",
    "losses/test_derivatives.py",
    "losses/test_linear.py",
    "objectives/test_analytic.py",
    "objectives/test_dropout.py",
    "diagnosis/test_enumeration.py",
    "diagnosis/test_explicit.py",
)
MODELS = ("mlp-256", "lstm-100", "gpt-128")
METHODS = ("none", "dropout", "tangent-both", "antithetic-both", "antithetic-both-quarter")
ROUNDS = 5
OBJECTIVES = ("none", "dropout", "analytic")
SETTINGS = ["data.limit_tokens=10000", "train.epochs=2"]


def machine(device: str) -> dict[str, Any]:
    """Return what the machine is, and the versions on it."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    capability = torch.backends.cpu.get_cpu_capability()
    found = {**describe(device), "gpu": gpu, "cpu": _cpu(), "cpu_capability": capability}
    return {"machine": found, "versions": {**versions(), "cuda": torch.version.cuda}}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Recorder:
    """A plugin of pytest that counts, and keeps what failed."""

    def __init__(self, progress: Progress) -> None:
        self.bar = progress.bar("math tests")
        self.wanted = 0
        self.counts: Counter[str] = Counter()
        self.files: dict[str, Counter[str]] = {}
        self.failures: list[dict[str, str]] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Learn how many tests there are."""
        self.wanted = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: by its call, or by the error that prevented the call."""
        if report.when != "call" and report.outcome == "passed":
            return
        self.counts[report.outcome] += 1
        self.files.setdefault(report.location[0], Counter())[report.outcome] += 1
        if report.failed:
            text = getattr(report.longrepr, "reprcrash", None)
            said = text.message if text is not None else str(report.longrepr)
            self.failures.append({"test": report.nodeid, "error": said[:500]})
        done = self.counts.total()
        self.bar.show(done / max(self.wanted, 1), f"{done} of {self.wanted}", report.location[0])


def maths(device: str, progress: Progress) -> dict[str, Any]:
    """Compare every estimator with exact answers, on the device."""
    recorder = Recorder(progress)
    options = ["-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main([*(str(TESTS / file) for file in MATHS), *options], [recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest stopped:\n{said.getvalue()[-2000:]}")
    return {
        "device": os.environ["UNDROP_TEST_DEVICE"],
        **{kind: recorder.counts[kind] for kind in ("passed", "failed", "skipped")},
        "files": {name: dict(counts) for name, counts in recorder.files.items()},
        "failures": recorder.failures,
    }


def ratios(device: str, progress: Progress) -> dict[str, Any]:
    """Time a step of each method on small models, as ratios to dropout."""
    bar, done = progress.bar("bench"), 0

    def tick(name: str) -> None:
        nonlocal done
        done += 1
        bar.show(done / (len(MODELS) * len(METHODS) * (ROUNDS + 1)), name)

    found = {}
    for model in MODELS:
        rows = bench(
            model, "small", rounds=ROUNDS, names=METHODS, memory=False, device=device, tick=tick
        )
        found[model] = [asdict(row) for row in rows]
    return {"threads": torch.get_num_threads(), "models": found}


def training(device: str, progress: Progress) -> dict[str, Any]:
    """Train a small LSTM for two epochs in three ways, from the same weights."""
    bar = progress.bar("training")
    bar.show(None, "two epochs with each of three objectives")
    settings = [*SETTINGS, f"train.device={device}"]
    configs = {
        name: configure("demo", {"objective": {"name": name}}, settings) for name in OBJECTIVES
    }
    with tempfile.TemporaryDirectory() as folder:
        summaries = train_interleaved(configs, out=Path(folder))
    rows = {
        name: {"valid_ppl": summary.best_valid_ppl, "seconds": summary.seconds}
        for name, summary in summaries.items()
    }
    return {"rows": rows}


PARTS: dict[str, Callable[[str, Progress], dict[str, Any]]] = {
    "maths": maths,
    "bench": ratios,
    "training": training,
}
