"""The cost of ``undrop.Dropout()`` relative to a hand-written dropout step.

    python benchmarks/dropout_step.py [--models mlp transformer awd-lstm] [--rounds 60]

Both run the same model with the same torch kernels. They take turns, in an order that alternates, so
that other work on the machine affects both alike. The figure is the median over rounds of their ratio
within a round, in wall-clock time and in CPU time, with the 90 % interval of that median. The limit is
1.03 for mlp, transformer and awd-lstm; the smaller networks pay more.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

import undrop
from undrop.lab.bench import SIZES, SUBJECTS, Subject, make_subject

Step = Callable[[], object]


class Ratio(NamedTuple):
    """The median ratio and its 90 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def steps(subject: Subject) -> tuple[Step, Step]:
    """Return the hand-written step and the step of ``undrop.Dropout``."""
    inputs = subject.inputs["tokens"] if isinstance(subject.inputs, dict) else subject.inputs
    objective = undrop.Dropout()
    return (
        lambda: subject.plain_loss().backward(),
        lambda: objective(subject.model, inputs, subject.targets).backward(),
    )


def timed(step: Step, repeats: int) -> torch.Tensor:
    """Return the seconds of wall-clock time and of CPU time that some steps take."""
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        step()
    return torch.tensor([time.perf_counter() - clock, time.process_time() - cpu])


def interval(ratios: torch.Tensor) -> Ratio:
    """Estimate the interval of the median by resampling the rounds."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(ratios), (2000, len(ratios)), generator=generator)
    medians = ratios[picks].median(1).values
    low, high = torch.quantile(medians, torch.tensor([0.05, 0.95])).tolist()
    return Ratio(ratios.median().item(), low, high)


def measure(subject: Subject, rounds: int, seconds: float) -> tuple[Ratio, Ratio]:
    """Return the ratios of wall-clock and of CPU time, with turns of about ``seconds`` each."""
    by_hand, by_undrop = steps(subject)
    for step in (by_hand, by_undrop):
        step()  # warm up: allocate the gradients, find the sites
    repeats = max(1, round(seconds / timed(by_hand, 3)[0].item() * 3))
    ratios = []
    gc.disable()
    for number in range(rounds):
        order = (by_hand, by_undrop) if number % 2 else (by_undrop, by_hand)
        times = {step: timed(step, repeats) for step in order}
        ratios.append(times[by_undrop] / times[by_hand])
    gc.enable()
    clock, cpu = torch.stack(ratios).unbind(1)
    return interval(clock), interval(cpu)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.2, help="the time of one turn")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'model':12} {'wall-clock time':>24} {'CPU time':>24}")
    for name in options.models:
        clock, cpu = measure(make_subject(name, options.size), options.rounds, options.seconds)
        print(f"{name:12} {clock!s:>24} {cpu!s:>24}")


if __name__ == "__main__":
    main()
