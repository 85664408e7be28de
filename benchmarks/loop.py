"""The cost of the lab's training loop relative to a hand-written loop around the same objective.

    python benchmarks/loop.py [--repeats 9] [--json FILE]

The lab's loop adds the schedule, means, progress, a line of metrics every 50 steps, and at the end of
each epoch a checkpoint and an evaluation on a validation split of a few words. The two loops take turns
epoch by epoch, so that other work on the machine affects both alike. The figure is the median of their
ratio in the same turn, in wall-clock time and in CPU time, which other work disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from undrop.lab import corpora
from undrop.lab.corpora.batching import TrainingWindows
from undrop.lab.models import detach
from undrop.lab.train import Config, RunFolder, configure
from undrop.lab.train.environment import Interrupts, World
from undrop.lab.train.session import _trainer

Seconds = tuple[float, float]  # of wall-clock time, of CPU time


def measure_time(work: Callable[[], object]) -> Seconds:
    """Return the time that some work takes."""
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - cpu


def bare_epoch(config: Config) -> Callable[[], None]:
    """Return a hand-written function that trains one epoch."""
    torch.manual_seed(config.train.seed)
    corpus = config.load_corpus()
    model = config.build_model(corpus).train()
    objective = config.build_objective(model)
    optimizer = torch.optim.SGD(model.parameters(), config.optimizer.lr)
    windows = TrainingWindows(corpus.train, config.data.batch_size, config.data.length)

    def epoch() -> None:
        state = None
        for window in windows:
            inputs = {"tokens": window.inputs, "state": state, "logits": False}
            step = objective(model, inputs, window.targets)
            step.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
            optimizer.step()
            optimizer.zero_grad()
            state = detach(step.output[1])

    return epoch


def write_corpus(folder: Path) -> None:
    """Write 30,000 words of the corpus pydocs to train on, and a few to evaluate on."""
    corpus = corpora.load("pydocs")
    words = corpus.vocabulary.decode(corpus.train[:30_000])
    lines = " ".join(words).replace(f" {corpora.EOS} ", "\n")
    for split, part in (("train", lines), ("valid", lines[:500]), ("test", lines[:500])):
        (folder / f"{split}.txt").write_text(part + "\n", encoding="utf-8")


def measure(name: str, repeats: int, folder: Path) -> dict[str, object]:
    """Return the ratios of the lab's loop to the hand-written one, for one objective."""
    settings = {"objective": {"name": name}, "data": {"name": str(folder)}}
    config = configure("demo", settings, [f"train.epochs={repeats + 1}", "train.threads=1"])
    bare, ratios = bare_epoch(config), []
    run = RunFolder(folder / name)
    with _trainer((config, run, []), False, World(), Interrupts()) as trainer:
        measure_time(bare), measure_time(trainer.advance)  # warm both up
        for _ in range(repeats):
            alone, looped = measure_time(bare), measure_time(trainer.advance)
            ratios.append([ours / theirs for ours, theirs in zip(looped, alone, strict=True)])
    by_clock, of_cpu = (statistics.median(kind) for kind in zip(*ratios, strict=True))
    per_step = 1e3 * alone[1] / trainer.step * trainer.epoch
    return {"objective": name, "clock": by_clock, "cpu": of_cpu, "bare_cpu_ms_per_step": per_step}


def main() -> None:
    """Measure none, dropout and analytic."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        names = ("none", "dropout", "analytic")
        rows = [measure(name, arguments.repeats, Path(folder)) for name in names]
    for row in rows:
        print(
            f"{row['objective']:<10} loop / bare step: {row['clock']:.3f} in wall-clock time, "
            f"{row['cpu']:.3f} in CPU time, at {row['bare_cpu_ms_per_step']:.1f} ms per bare step"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
