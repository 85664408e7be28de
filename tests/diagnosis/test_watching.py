"""The figures of a watcher are unbiased, and training stays the same."""

import pytest
import torch

import undrop
from problems import LOSSES, problem


def test_the_explicit_figures_of_a_watcher_have_the_exact_means():
    made = problem("lstm")
    found = []
    for seed in range(300):
        watcher = undrop.Watcher(loss=made.loss, interval=1, implicit=False, seed=seed)
        found.append(watcher.observe(0, made.model, made.inputs, made.targets))
    objective = undrop.Analytic(
        engine="exact", strength=undrop.TAYLOR, implicit=False, loss=made.loss
    )
    exact = objective(made.model, made.inputs, made.targets).parts["explicit"]
    values = torch.tensor([figures["half_quadratic"] for figures in found])
    error = values.std().item() / 300**0.5
    assert abs(values.mean().item() - exact) < 4 * error
    assert error < 0.1 * exact
    for figures in found:
        shares = [value for name, value in figures.items() if name.startswith("share/")]
        assert sum(shares) == pytest.approx(1.0)
    names = {f"share/{site.name}" for site in undrop.sites(made.model, made.inputs)}
    assert names == {name for name in found[0] if name.startswith("share/")}


def test_the_mean_squared_norm_of_a_watcher_is_the_trace_of_the_implicit_noise():
    made = problem("mlp")
    found = [
        undrop.Watcher(loss=made.loss, interval=1, seed=seed).observe(
            0, made.model, made.inputs, made.targets
        )["xi_norm"]
        for seed in range(200)
    ]
    subject = undrop.diagnose(
        made.model, [(made.inputs, made.targets)], seconds=1e3, draws=200, progress=False
    )
    trace = subject.implicit.trace_analytic
    squares = torch.tensor(found) ** 2
    error = (squares.var().item() / 200 + trace.stderr**2) ** 0.5
    assert abs(squares.mean().item() - trace.value) < 4 * error


def test_a_watcher_observes_only_at_its_interval():
    made = problem("mlp")
    watcher = undrop.Watcher(loss=made.loss, interval=3)
    observed = [
        watcher.observe(step, made.model, made.inputs, made.targets) is not None
        for step in range(1, 8)
    ]
    assert observed == [False, False, True, False, False, True, False]


def test_an_observation_depends_only_on_seed_and_step():
    made = problem("mlp")
    batch = (made.model, made.inputs, made.targets)
    through = undrop.Watcher(loss=made.loss, interval=1)
    first, second = through.observe(1, *batch), through.observe(2, *batch)
    resumed = undrop.Watcher(loss=made.loss, interval=1)
    assert resumed.observe(2, *batch) == second
    assert first != second


def test_training_is_bit_for_bit_the_same_with_a_watcher():
    """The same steps with and without a watcher lead to bit for bit the same weights."""

    def trained(watch):
        made = problem("batch_norm")
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        objective = undrop.Dropout(2, loss=made.loss)
        watcher = undrop.Watcher(loss=made.loss, interval=2)
        for step in range(6):
            optimizer.zero_grad()
            objective(made.model, made.inputs, made.targets).backward()
            if watch:
                watcher.observe(step, made.model, made.inputs, made.targets)
            optimizer.step()
        return made.model.state_dict()

    watched, alone = trained(True), trained(False)
    for name, value in alone.items():
        assert torch.equal(value, watched[name]), name


def test_a_loss_passed_to_one_observation_is_not_used_in_the_next():
    made = problem("mlp")
    watcher = undrop.Watcher(interval=1)
    before = watcher.observe(0, made.model, made.inputs, made.targets)
    squared = watcher.observe(
        0, made.model, made.inputs, torch.zeros(3, 3).double(), loss=undrop.losses.MSE()
    )
    assert squared != before
    assert watcher.observe(0, made.model, made.inputs, made.targets) == before


def test_a_loss_without_likelihood_gives_no_shares():
    made = problem("mlp", "generic")
    watcher = undrop.Watcher(loss=made.loss, interval=1)
    figures = watcher.observe(0, made.model, made.inputs, made.targets)
    assert set(figures) == {"half_quadratic", "xi_norm"}
    assert figures["half_quadratic"] != 0.0
    assert "generic" in LOSSES


@pytest.mark.parametrize("interval", [0, 1.5, True])
def test_an_interval_that_is_not_a_positive_integer_is_refused(interval):
    message = f"interval must be a whole number of at least 1, got {interval}"
    with pytest.raises(undrop.errors.OptionError, match=message):
        undrop.Watcher(interval=interval)


def test_watching_a_model_without_dropout_is_an_error():
    plain = torch.nn.Linear(2, 2)
    with pytest.raises(undrop.errors.NoDropoutError, match="Linear has no active dropout to watch"):
        undrop.Watcher(interval=1).observe(0, plain, torch.randn(1, 2), torch.tensor([0]))
