"""Every engine and ``fraction`` on random models, against brute force in float64."""

import os

import pytest
import torch

from engine_helpers import BOTH, evaluate, gradient, random_signs, relative
from problems import D
from random_models import random_problem
from undrop.engines import Antithetic, ScaledNoise, Tangent
from undrop.engines.proven import first_unproven_op
from undrop.errors import EngineError
from undrop.intercept import Interception, call, keep_statistics, logits_of

SEEDS = range(int(os.environ.get("UNDROP_RANDOM_MODELS", "50")))
STEP = 1e-4


def tangent_by_differences(p, draw):
    """F and u from plain passes at 0 and ±ε, one after the other."""

    def output(epsilon):
        noisy = Interception(p.model, ScaledNoise(draw, epsilon))
        with torch.no_grad(), keep_statistics(p.model), noisy:
            return logits_of(call(p.model, p.inputs))

    return output(0.0), (output(STEP) - output(-STEP)) / (2 * STEP)


def expected_parts(p, f, u):
    parts = p.loss.derivatives(f.clone().requires_grad_(), u, p.targets)
    return [float(part.detach()) for part in parts]


def close(found, wanted, tolerance):
    scale, pairs = max(map(abs, wanted)), zip(found, wanted, strict=True)
    return all(abs(a - b) <= tolerance * max(abs(b), 0.05 * scale) for a, b in pairs)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_engine_is_wrong_in_silence_on_a_random_model(seed):
    made = random_problem(seed)
    p, draw = made.problem, random_signs(made.problem, seed)
    f, u = tangent_by_differences(p, draw)
    wanted = expected_parts(p, f, u)
    stacked = evaluate(Antithetic(STEP), p, draw, BOTH)
    assert close([float(v) for v in stacked.parts.values()], wanted, 1e-3), made.description
    if first_unproven_op(p.model, p.inputs) is None:
        tangent = evaluate(Tangent(), p, draw, BOTH)
        assert close([float(v) for v in tangent.parts.values()], wanted, 1e-3), made.description
        if "two passes" not in stacked.engine:
            a, b = (gradient(e.total, p.model) for e in (stacked, tangent))
            assert relative(a, b) < 1e-3, made.description


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fraction_is_right_or_refused_on_a_random_model(monkeypatch, seed):
    made = random_problem(seed)
    p, draw, dim = made.problem, random_signs(made.problem, seed), made.batch_dim
    batch = p.inputs.shape[dim]
    noisy = batch // 2
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    try:
        how = {"fraction": noisy / batch, "batch_dim": dim}
        found = evaluate(Antithetic(STEP), p, draw, BOTH, **how)
    except EngineError as error:
        assert "fraction < 1 needs independent examples" in str(error)  # noqa: PT017
        return
    f, u = tangent_by_differences(p, draw)
    u = u.clone()
    u.narrow(dim, 0, batch - noisy).zero_()
    loss, quadratic, directional = expected_parts(p, f, u)
    rho = noisy / batch
    wanted = [loss, quadratic / rho, directional / rho**0.5]
    assert close([float(v) for v in found.parts.values()], wanted, 1e-3), made.description
    # Of O(ε₀), where all examples share noise; without an error on request.
    torch.testing.assert_close(found.output, f.to(D), rtol=1e-3, atol=1e-3)
    exact = evaluate(Antithetic(STEP), p, draw, BOTH, **how, exact_output=True)
    torch.testing.assert_close(exact.output, f.to(D), rtol=1e-5, atol=1e-6)
