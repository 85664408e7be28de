"""The slopes that tuning goes by, against exact gradients."""

import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from undrop.intercept import Interception, Selection, logits_of
from undrop.lab.models import AWDLSTM
from undrop.tuning.signal import Look, signal

LOSSES = {
    "cross entropy": (undrop.CrossEntropy, lambda g: torch.randint(4, (8,), generator=g)),
    "squared error": (undrop.MSE, lambda g: torch.rand(8, 4, generator=g).double()),
    "binary": (undrop.BCEWithLogits, lambda g: torch.rand(8, 4, generator=g).double()),
}
DRAWS = 1200


def problem(name):
    torch.manual_seed(3)
    model = nn.Sequential(
        *(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 6), nn.Tanh()),
        *(nn.Dropout(0.2), nn.Linear(6, 4)),
    ).double()
    loss, targets = LOSSES[name]
    random = new_generator(4)
    pairs = [(torch.randn(8, 5, generator=random).double(), targets(random)) for _ in range(2)]
    return model, loss(), *pairs


def exact_slopes(model, loss, batch, held):
    """⟨∇L_val, ∇r_i⟩ by enumeration of the whole Jacobian."""
    weights = list(model.parameters())
    plain = undrop.NoRegularization(loss=loss)
    v = torch.autograd.grad(plain(model, *held).total, weights)
    slopes = {}
    for site in undrop.sites(model, batch[0]):
        objective = undrop.Analytic(engine="exact", implicit=False, sites=site.name, loss=loss)
        explicit = objective(model, *batch).total - plain(model, *batch).total
        g = torch.autograd.grad(explicit, weights, allow_unused=True, materialize_grads=True)
        inner = sum(float((a * b).sum()) for a, b in zip(v, g, strict=True))
        slopes[site.name] = inner / site.sigma**2
    return slopes


@pytest.mark.parametrize("closed", [True, False], ids=["root of H", "any loss"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_slope_is_the_exact_one(name, closed, monkeypatch):
    """Within 4 standard errors over 1,200 draws; at most 1 % of it is due to the finite stride."""
    model, loss, batch, held = problem(name)
    exact = exact_slopes(model, loss, batch, held)
    if not closed:
        monkeypatch.setattr(type(loss), "root", lambda *_: None)
    weights = list(model.parameters())
    at = [w.detach().clone() for w in weights]
    found = {site: [] for site in exact}
    for seed in range(DRAWS):
        look = Look(model, loss, "as-declared", Selection(), seed)
        slopes = signal(look, weights, at, batch, held).slopes
        for site in exact:
            found[site].append(slopes[site])
    for site, values in found.items():
        mean, error = torch.tensor(values).mean(), torch.tensor(values).std() / DRAWS**0.5
        assert abs(mean - exact[site]) < 4.0 * error + 0.01 * abs(exact[site])
        assert error < 0.1 * abs(exact[site]) + 2e-4


def test_the_slope_along_weight_decay_is_the_inner_product_with_the_weights():
    model, loss, batch, held = problem("cross entropy")
    weights = list(model.parameters())
    at = [w.detach().clone() for w in weights]
    look = Look(model, loss, "as-declared", Selection(), 0)
    v = torch.autograd.grad(undrop.NoRegularization(loss=loss)(model, *held).total, weights)
    expected = sum(float((a * b).sum()) for a, b in zip(v, at, strict=True))
    assert signal(look, weights, at, batch, held).decay == pytest.approx(expected, rel=1e-9)


def test_the_signal_is_taken_at_the_given_weights_and_puts_the_old_ones_back():
    model, loss, batch, held = problem("cross entropy")
    weights = list(model.parameters())
    before = [w.detach().clone() for w in weights]
    look = Look(model, loss, "as-declared", Selection(), 0)
    here = signal(look, weights, before, batch, held)
    there = signal(look, weights, [2.0 * w for w in before], batch, held)
    assert here.loss != there.loss
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))


def test_locked_masks_and_shared_weights_have_slopes_of_their_own():
    torch.manual_seed(0)
    model = AWDLSTM(20, embedding_size=8, hidden_size=8, layers=2)
    tokens = torch.randint(20, (6, 4))
    weights = [p for p in model.parameters() if p.requires_grad]
    at = [w.detach().clone() for w in weights]
    look = Look(model, undrop.CrossEntropy(), "as-declared", Selection(), 0)
    found = signal(look, weights, at, (tokens, tokens), (tokens.flip(0), tokens.flip(0)))
    with Interception(model, lambda site, h: h) as mode:
        logits_of(model(tokens))
    assert set(found.slopes) == {site.name for site in mode.sites}
    assert all(size > 0.0 for size in found.sizes.values())
