"""What the hand-written kernels cost, as ratios to torch's own layers, forward and backward.

The stack is the paper's: three LSTM layers, 400 → 1150 → 1150 → 400, batch 20, 70 steps; the head has
10,000 words. All cases take turns within one process, round after round, and a ratio is the median
of those of the rounds, so that whatever else the machine does weighs on all alike.

    python benchmarks/kernels.py --rounds 9
    python benchmarks/kernels.py --clock cpu --threads 1      # where others use the machine
    python benchmarks/kernels.py --profile "quarter rows, weights"
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from undrop.kernels.attention import attention
from undrop.kernels.gru import gru
from undrop.kernels.lstm import lstm
from undrop.losses.linear import LinearCrossEntropy

Case = Callable[[], None]
STEPS, BATCH, QUARTER, WORDS = 70, 20, 5, 10_000
SIZES = ((400, 1150), (1150, 1150), (1150, 400))
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).mul_(0.1).requires_grad_()


def stack(kind: type[nn.RNNBase], kernel: Callable[..., tuple]) -> dict[str, Case]:
    """Three layers by torch and by the kernel."""
    layers = [kind(inputs, size) for inputs, size in SIZES]
    noise = [torch.randn_like(layer.weight_hh_l0) for layer in layers]
    x, dx = _leaf(STEPS, BATCH, SIZES[0][0]), _leaf(STEPS, BATCH, SIZES[0][0])
    function = torch.lstm if kind is nn.LSTM else torch.gru

    def theirs(weights: bool) -> Case:
        """Torch's layer; with weights, each multiplied by a DropConnect mask."""

        def run() -> None:
            y = x
            for layer, eta in zip(layers, noise, strict=True):
                w_ih, w_hh, *biases = layer.parameters()
                zero = x.new_zeros(1, BATCH, layer.hidden_size)
                state = (zero, zero) if kind is nn.LSTM else zero
                parameters = [w_ih, w_hh * eta if weights else w_hh, *biases]
                y = function(y, state, parameters, True, 1, 0.0, True, False, False)[0]
            y.sum().backward()

        return run

    def ours(rows: int, weights: bool) -> Case:
        def run() -> None:
            y, dy = x, dx[:, :rows] if rows else None
            for layer, eta in zip(layers, noise, strict=True):
                w_ih, w_hh, *biases = layer.parameters()
                moved = w_hh * eta if weights else None
                y, dy, *_ = kernel(y, dy, None, None, w_ih, w_hh, *biases, None, moved)
            (y.sum() if dy is None else y.sum() + dy.sum()).backward()

        return run

    return {
        "torch": theirs(weights=False),
        "torch, weights": theirs(weights=True),
        "no tangent": ours(0, weights=False),
        "quarter rows": ours(QUARTER, weights=False),
        "all rows": ours(BATCH, weights=False),
        "quarter rows, weights": ours(QUARTER, weights=True),
        "all rows, weights": ours(BATCH, weights=True),
    }


def head() -> dict[str, Case]:
    """The output layer with its loss, dense by torch and in chunks."""
    weight, bias = _leaf(WORDS, SIZES[-1][1]), _leaf(WORDS)
    features, u = _leaf(STEPS, BATCH, SIZES[-1][1]), _leaf(STEPS, BATCH, SIZES[-1][1])
    target = torch.randint(WORDS, (STEPS, BATCH))
    loss = LinearCrossEntropy(weight, bias)

    def dense() -> None:
        logits = F.linear(features, weight, bias)
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()

    def tangent(rows: int) -> Case:
        def run() -> None:
            share = rows / BATCH
            total, _ = loss.combined(
                features[:, :rows], u[:, :rows], target[:, :rows], weights=(share, 1.0, 1.0)
            )
            if rows < BATCH:
                rest = loss.value(features[:, rows:], target[:, rows:])
                total = total + (1.0 - share) * rest
            total.backward()

        return run

    return {
        "torch": dense,
        "no tangent": lambda: loss.value(features, target).backward(),
        "quarter rows": tangent(QUARTER),
        "all rows": tangent(BATCH),
    }


def attend() -> dict[str, Case]:
    """Causal attention of 16 × 4 heads over 128 tokens, with dropout on the probabilities."""
    q, k, v, dq, dk, dv = (_leaf(16, 4, 128, 64) for _ in range(6))
    noise = torch.randn(16, 4, 128, 128)

    def theirs() -> None:
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True).sum().backward()

    def ours() -> None:
        out, dout = attention(q, k, v, dq, dk, dv, is_causal=True, noise=noise)
        (out.sum() + dout.sum()).backward()

    return {"torch": theirs, "all rows": ours}


GROUPS: dict[str, Callable[[], dict[str, Case]]] = {
    "lstm": lambda: stack(nn.LSTM, lstm),
    "gru": lambda: stack(nn.GRU, gru),
    "head": head,
    "attention": attend,
}


def measure(cases: dict[str, Case], rounds: int, clock: Callable[[], float]) -> None:
    """Run all cases in turn; print medians of seconds and of ratios to torch."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for n in range(rounds + 1):
        for name, case in cases.items():
            start = clock()
            case()
            if n > 0:  # the first round warms up
                seconds[name].append(clock() - start)
    for name, times in seconds.items():
        same = f"torch, {name.split(', ')[1]}" if ", " in name else "torch"
        ratios = sorted(a / b for a, b in zip(times, seconds[same], strict=True))
        print(
            f"  {name:24} {1e3 * statistics.median(times):8.1f} ms   × {same:15} "
            f"{statistics.median(ratios):5.2f}  [{ratios[0]:.2f}, {ratios[-1]:.2f}]",
            flush=True,
        )


def main() -> None:
    """Measure, or profile one case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", default=["lstm", "head"], help=", ".join(GROUPS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--profile", metavar="CASE", help="where the time of a case goes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    for group in options.groups:
        print(group, flush=True)
        cases = GROUPS[group]()
        if options.profile is None:
            measure(cases, options.rounds, CLOCKS[options.clock])
            continue
        case = cases[options.profile]
        case()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            case()
        table = profiled.key_averages(group_by_input_shape=True)
        print(table.table(sort_by="self_cpu_time_total", row_limit=25))


if __name__ == "__main__":
    main()
