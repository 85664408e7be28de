"""Every engine and ``fraction`` on one random model, against brute force in float64.

As a program it examines many, writes one line for each, and continues where it was stopped::

    python tests/random_checks.py --models 2000 --record random_models.jsonl
"""

import argparse
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from engine_helpers import BOTH, evaluate, gradient, random_signs, relative
from random_models import changed, random_problem
from undrop.engines import Antithetic, Auto, Reverse, ScaledNoise, Tangent
from undrop.engines.proven import first_unproven_op
from undrop.errors import EngineError
from undrop.intercept import Interception, call, keep_buffers, logits_of
from undrop.losses import Coefficients
from undrop.rng_snapshot import RngSnapshot

STEP, SHORT = 1e-4, 1e-5
TOLERANCE = 2e-3


def brute_force(p, draw, mask=None, rho=1.0):
    """The output, the parts and the gradient, from plain passes at ε = 0 and ±ε, one after the other.

    Args:
        p: the problem.
        draw: the noise.
        mask: 1 for the entries of the output that carry noise, else 0; None if all do.
        rho: the share of the examples that carry noise.
    """
    rng, outputs = RngSnapshot(p.model), []
    for epsilon in (0.0, SHORT, -SHORT):
        rng.restore()
        with keep_buffers(p.model), Interception(p.model, ScaledNoise(draw, epsilon)):
            outputs.append(logits_of(call(p.model, p.inputs)))
    rng.restore()
    f, plus, minus = outputs
    u = (plus - minus) / (2 * SHORT) * (1.0 if mask is None else mask)
    scale = Coefficients(1.0, 1.0 / rho, rho**-0.5)
    total, parts = p.loss.combined(f, u, p.targets, "hessian", scale)
    values = [float(v) * c for v, c in zip(parts, scale, strict=True)]
    return f.detach(), values, gradient(total, p.model)


def close(found, wanted, tolerance=TOLERANCE):
    scale, pairs = max(map(abs, wanted)), zip(found, wanted, strict=True)
    return all(abs(a - b) <= tolerance * max(abs(b), 0.05 * scale) for a, b in pairs)


def compare(p, engine, draw, wanted, **options):
    """Return "right", "refused", or what is wrong."""
    f, parts, expected = wanted
    rng = RngSnapshot(p.model)
    try:
        with keep_buffers(p.model):
            found = evaluate(engine, p, draw, BOTH, **options)
            output = logits_of(found.output)
    except EngineError as error:
        return "refused" if str(error) else "an error without words"
    finally:
        rng.restore()
    values = [float(v) for v in found.parts.values()]
    if not close(values, parts):
        return f"{found.engine}: {values} instead of {parts}"
    # Where all examples share noise, the output of a part of the batch is off by O(ε₀).
    loose = options.get("fraction", 1.0) < 1.0 and not options.get("exact_output")
    close_enough = {"rtol": 1e-3, "atol": 1e-3} if loose else {"rtol": 1e-5, "atol": 1e-6}
    if not torch.allclose(output, f, **close_enough) and not vanishes(
        p, draw, f, output, 3.0 if loose else 8.0, **options
    ):
        return f"{found.engine}: another output"
    off = relative(gradient(found.total, p.model), expected)
    if off > 2e-2:
        return f"{found.engine}: a gradient that is {off:.0%} off"
    return "right"


def vanishes(p, draw, f, output, factor, **options):
    """Whether the error of the output falls by that factor, or more, with a quarter of the step.

    Near a batch norm of a small variance, or an RMS norm of a small number, O(ε₀²) can be large.
    """
    with RngSnapshot(p.model), keep_buffers(p.model):
        finer = logits_of(evaluate(Antithetic(STEP / 4), p, draw, BOTH, **options).output)
    return bool((output - f).abs().max() > factor * (finer - f).abs().max())


@contextmanager
def order(permutation):
    """Examples that carry noise: the last ones of a permutation."""
    original = torch.randperm
    torch.randperm = lambda n, **_: permutation
    try:
        yield
    finally:
        torch.randperm = original


def compare_fraction(made, draw, **options):
    p, dim = made.problem, made.batch_dim
    batch = p.inputs.shape[dim]
    noisy = batch // 2
    places = torch.rand(batch, generator=torch.Generator().manual_seed(batch)).argsort()
    with torch.no_grad(), RngSnapshot(p.model), keep_buffers(p.model):
        shape = [1] * logits_of(call(p.model, p.inputs)).dim()
    shape[dim] = batch
    mask = torch.zeros(batch, dtype=torch.float64)
    mask[places[batch - noisy :]] = 1.0
    wanted = brute_force(p, draw, mask.view(shape), noisy / batch)
    with order(places):
        how = {"fraction": noisy / batch, "batch_dim": dim, **options}
        return compare(p, Antithetic(STEP), draw, wanted, **how)


def noise_of(p, seed):
    """The signs; the model's own random numbers are the same while its sites are found."""
    with RngSnapshot(p.model):
        return random_signs(p, seed)


def examine(seed):
    """Return what each engine does on the model of that seed, at first and later in its training."""
    made, found = random_problem(seed), {}
    for time in ("first", "later"):
        p, draw = made.problem, noise_of(made.problem, seed)
        wanted = brute_force(p, draw)
        engines = {"antithetic": Antithetic(STEP)}
        if first_unproven_op(p.model, p.inputs) is None:
            engines["tangent"] = Tangent()
        for name, engine in engines.items():
            found[f"{time} {name}"] = compare(p, engine, draw, wanted)
        found[f"{time} auto"] = compare(p, Auto(STEP), draw, wanted)
        found[f"{time} half"] = compare_fraction(made, draw)
        found[f"{time} half, exact output"] = compare_fraction(made, draw, exact_output=True)
        found[f"{time} reverse"] = compare_reverse(p, draw, wanted)
        made = changed(made, seed)
    return {"seed": seed, "model": made.description, "found": found}


def compare_reverse(p, draw, wanted):
    """The reverse engine samples its explicit part; the others are those of the draw."""
    c = Coefficients(1.0, 0.0, 1.0)
    rng = RngSnapshot(p.model)
    try:
        with keep_buffers(p.model):
            parts = evaluate(Reverse(), p, draw, c).parts
    except (EngineError, NotImplementedError, RuntimeError) as error:
        return "refused" if str(error) else "an error without words"
    finally:
        rng.restore()
    values = [float(parts["loss"]), float(parts["implicit"])]
    expected = [wanted[1][0], wanted[1][2]]
    return "right" if close(values, expected) else f"reverse: {values} instead of {expected}"


def wrong(report):
    return {k: v for k, v in report["found"].items() if v not in ("right", "refused")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--record", type=Path, default=Path("random_models.jsonl"))
    options = parser.parse_args()
    lines = options.record.read_text().splitlines() if options.record.exists() else []
    reports = [json.loads(line) for line in lines]
    done = {report["seed"] for report in reports}
    with options.record.open("a") as record:
        for seed in range(options.first, options.first + options.models):
            if seed not in done:
                reports.append(examine(seed))
                record.write(json.dumps(reports[-1]) + "\n")
                record.flush()
    outcomes = [v for report in reports for v in report["found"].values()]
    bad = [report for report in reports if wrong(report)]
    for report in bad:
        print(report["model"], wrong(report))
    right, refused = (outcomes.count(v) for v in ("right", "refused"))
    print(
        f"{len(reports)} models, {len(outcomes)} comparisons: {right} right, {refused} refused, "
        f"{len(outcomes) - right - refused} wrong"
    )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
