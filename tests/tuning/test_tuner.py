"""A tuner moves p by the evidence, resumes bit for bit, and refuses data it can't use."""

import copy
import math
import statistics

import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from undrop.diagnosis.measure.estimates import Estimate
from undrop.errors import DataError, NoDropoutError, OptionError
from undrop.tuning import set_aside
from undrop.tuning.history import EVERY_SITE, Entry, History
from undrop.tuning.moves import MAX_SIZE, MIN_SIZE, MoveSize, log_odds
from undrop.tuning.trial import TrialResult

OBJECTIVES = {
    "analytic": lambda: undrop.Analytic(engine="antithetic", generator=new_generator(1)),
    "dropout": lambda: undrop.Dropout(generator=new_generator(1)),
}
BELOW, UNCLEAR, ABOVE = (Estimate.of(value, 0.1) for value in (-1.0, 0.0, 1.0))
"""Gaps: the validation loss minus the training loss."""


def network(p=0.2):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(p)),
        *(nn.Linear(24, 24), nn.Tanh(), nn.Dropout(p), nn.Linear(24, 3)),
    )


class DropoutSubclass(nn.Dropout):
    """A subclass of torch's dropout: a tuner does not set its p."""


def batches(count, seed, rows=12, noise=0.0):
    """Classes by a linear teacher; a share ``noise`` of the labels is random."""
    random = new_generator(seed)
    teacher = torch.randn(6, 3, generator=new_generator(99))
    found = []
    for _ in range(count):
        x = torch.randn(rows, 6, generator=random)
        y = (x @ teacher).argmax(1)
        wrong = torch.rand(rows, generator=random) < noise
        found.append((x, torch.where(wrong, torch.randint(3, (rows,), generator=random), y)))
    return found


def tuner_for(objective, **options):
    options.setdefault("generator", new_generator(2))
    return undrop.Tuner(objective, batches(6, seed=5), **options)


def train(tuner, model, optimizer, data):
    for x, y in data:
        step = tuner.step(model, x, y)
        optimizer.zero_grad()
        step.backward()
        optimizer.step()


def sgd(model, lr=0.2):
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_plain_loop_moves_p_of_every_site_in_the_tuner_and_in_the_objective(name):
    model, tuner = network(), tuner_for(OBJECTIVES[name](), interval=5)
    train(tuner, model, sgd(model), batches(40, seed=3))
    assert set(tuner.probabilities) == {"2", "5"}
    assert all(0.005 <= p <= 0.7 and p != pytest.approx(0.1) for p in tuner.probabilities.values())
    site = tuner.objective.sites(model, batches(1, 0)[0][0])[0]
    variance = tuner.objective.selection.sigma(site) ** 2
    assert variance == pytest.approx(math.exp(log_odds(tuner.probabilities["2"])))
    if name == "dropout":
        assert tuner.objective.site_p == tuner.probabilities
    assert [e.step for e in tuner.history.entries] == list(range(5, 41, 5))
    tried = [e.tried for e in tuner.history.entries[:6]]
    assert tried == ["every site", "every site", "2", "every site", "every site", "5"]


def test_tuned_p_in_torchs_own_modules_drops_the_same_entries_as_an_interception():
    """A subclass of ``nn.Dropout`` in the model makes the objective use an interception."""
    x, y = batches(1, seed=3)[0]
    objective, losses = undrop.Dropout(), []
    objective.site_p = {"2": 0.3, "5": 0.6}
    for model in (network(), nn.Sequential(*network()[:5], DropoutSubclass(0.2), network()[6])):
        model.load_state_dict(network().state_dict())
        torch.manual_seed(4)
        losses.append(float(objective(model, x, y).total.detach()))
        assert (model[2].p, model[5].p) == (0.2, 0.2)
    assert losses[0] == losses[1]


def test_tuned_dropout_drops_at_the_tuned_rate():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout(0.5))
    nn.init.ones_(model[0].weight)
    for generator in (None, new_generator(0)):
        objective = undrop.Dropout(loss=undrop.MSE(), generator=generator)
        objective.site_p = {"1": 0.1}
        output = objective(model, torch.ones(20000, 1), torch.zeros(20000, 1)).output
        assert float((output == 0.0).float().mean()) == pytest.approx(0.1, abs=0.01)
        assert float(output.detach().max()) == pytest.approx(1.0 / 0.9, rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_trial_does_not_change_weights_gradients_buffers_or_random_states(name):
    model = nn.Sequential(network(), nn.BatchNorm1d(3))
    objective = OBJECTIVES[name]()
    tuner, data = tuner_for(objective, interval=12), batches(12, seed=3)
    train(tuner, model, sgd(model), data[:11])
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    own, gradients = copy.deepcopy(objective.state_dict()), [p.grad for p in model.parameters()]
    assert tuner.observe(model, *data[11]) is not None
    assert tuner.history.entries[0].difference != 0.0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert own["steps"] == objective.steps
    assert torch.equal(own["generators"]["cpu"], objective.state_dict()["generators"]["cpu"])


def test_p_does_not_rise_above_its_start_unless_the_model_overfits(monkeypatch):
    """The gap of a trial uses training batches of the previous trial."""
    result, earlier = TrialResult(Estimate.of(1.0, 0.1), UNCLEAR), []

    def run_trial(*arguments):
        earlier.append(arguments[-1])
        return result

    model, tuner = network(), tuner_for(undrop.Dropout(), interval=20)
    monkeypatch.setattr("undrop.tuning.tuner.run_trial", run_trial)
    data = batches(60, seed=3)
    train(tuner, model, sgd(model), data[:40])
    assert list(tuner.probabilities.values()) == [pytest.approx(0.1)] * 2
    result = result._replace(gap=ABOVE)
    train(tuner, model, sgd(model), data[40:])
    assert tuner.probabilities["2"] > 0.15
    assert [len(each) for each in earlier] == [0, 4, 4]
    assert [x for x, _ in earlier[1]] == [x for x, _ in data[16:20]]


def test_p_and_weight_decay_do_not_fall_below_their_start_while_the_model_overfits(monkeypatch):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    tuner = tuner_for(undrop.Dropout(), interval=2, optimizer=optimizer)
    result = TrialResult(Estimate.of(-1.0, 0.1), UNCLEAR)
    monkeypatch.setattr("undrop.tuning.tuner.run_trial", lambda *_: result)
    train(tuner, model, optimizer, batches(8, seed=3))
    assert max(tuner.probabilities.values()) < 0.05
    assert optimizer.param_groups[0]["weight_decay"] < 5e-3
    resumed = tuner_for(undrop.Dropout(), interval=2, optimizer=optimizer)
    resumed.load_state_dict(tuner.state_dict())
    result = result._replace(gap=ABOVE)
    train(resumed, model, optimizer, batches(2, seed=14))
    assert list(resumed.probabilities.values()) == [pytest.approx(0.1)] * 2
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(1e-2)
    result = TrialResult(Estimate.of(1.0, 0.1), ABOVE)
    train(resumed, model, optimizer, batches(4, seed=15))
    assert min(resumed.probabilities.values()) > 0.1


def test_weight_decay_falls_while_the_validation_loss_is_clearly_below_the_training_loss(
    monkeypatch,
):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    tuner = tuner_for(undrop.Dropout(), interval=2, optimizer=optimizer)
    result, found = TrialResult(Estimate.of(0.0, 0.1), UNCLEAR), []
    monkeypatch.setattr("undrop.tuning.tuner.run_trial", lambda *_: result)
    for gap in (UNCLEAR, BELOW, BELOW, UNCLEAR, ABOVE):
        result = result._replace(gap=gap)
        train(tuner, model, optimizer, batches(2, seed=3))
        found.append(optimizer.param_groups[0]["weight_decay"])
    assert found == pytest.approx([1e-2, 1e-2 / 3, 1e-2 / 9, 1e-2 / 9, 1e-2])
    assert list(tuner.probabilities.values()) == [pytest.approx(0.1)] * 2


def test_there_is_no_trial_if_the_weights_do_not_move():
    model, tuner = network(), tuner_for(undrop.Dropout(), interval=3)
    for x, y in batches(9, seed=3):
        tuner.step(model, x, y).backward()  # and no optimizer's step
    assert tuner.history.entries == []
    assert list(tuner.probabilities.values()) == [pytest.approx(0.1)] * 2


def test_a_tuner_refuses_to_work_in_several_processes(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(OptionError, match="works in one process, and there are 2"):
        tuner_for(undrop.Dropout()).step(network(), *batches(1, seed=3)[0])


@pytest.mark.parametrize("cut", [19, 26])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resumed_run_is_the_same_to_the_bit(name, cut):
    """A trial at step 30 repeats steps 21 to 30: one cut lies before them, one among them."""
    data = batches(60, seed=3)
    model, tuner = network(), tuner_for(OBJECTIVES[name](), interval=15)
    optimizer = sgd(model)
    train(tuner, model, optimizer, data[:cut])
    saved, weights = copy.deepcopy(tuner.state_dict()), copy.deepcopy(model.state_dict())
    train(tuner, model, optimizer, data[cut:])

    again, resumed = network(), tuner_for(OBJECTIVES[name](), interval=15)
    again.load_state_dict(weights)
    resumed.load_state_dict(saved)
    train(resumed, again, sgd(again), data[cut:])
    assert resumed.probabilities == tuner.probabilities
    assert resumed.history.entries == tuner.history.entries
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )


def test_a_state_saved_to_bytes_restores_p_and_the_history():
    from undrop.tensor_files import from_bytes, to_bytes

    model, tuner = network(), tuner_for(undrop.Dropout(), interval=2)
    train(tuner, model, sgd(model), batches(6, seed=3))
    other = tuner_for(undrop.Dropout(), interval=2)
    other.load_state_dict(from_bytes(to_bytes(tuner.state_dict())))
    assert other.probabilities == tuner.probabilities
    assert other.history.entries == tuner.history.entries


def test_an_optimizer_s_weight_decay_is_tuned_like_a_site():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    tuner = tuner_for(undrop.Dropout(), interval=2, optimizer=optimizer)
    train(tuner, model, optimizer, batches(30, seed=3))
    assert optimizer.param_groups[0]["weight_decay"] != 1e-2
    assert "weight decay" in tuner.history.benefits()
    assert "weight decay" not in tuner.probabilities
    assert tuner.metrics()["weight decay"] == optimizer.param_groups[0]["weight_decay"]
    assert "weight decay (λ = " in tuner.table().text()
    with pytest.raises(OptionError, match=r"weight decay of 0\.0"):
        tuner_for(undrop.Dropout(), optimizer=sgd(model))


@pytest.mark.parametrize("start", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("rate", [0.22, 0.7, 2.2])
def test_eight_trials_find_the_best_value_from_every_start_and_over_a_factor_10_of_the_rate(
    start, rate
):
    """z-scores of a quadratic around p = 0.15 with noise of size 1: the mean of 100 such runs."""
    errors, best = [], log_odds(0.15)
    for seed in range(100):
        random, size, value = new_generator(seed), MoveSize(rate), log_odds(start)
        for _ in range(8):
            value += size.next_move(best - value + float(torch.randn((), generator=random)))
        errors.append(abs(value - best))
    assert sum(errors) / 100 < 0.75  # the starts are off by 1.2, 0.3 and 2.1


def test_moves_grow_while_trials_agree_and_shrink_when_their_sign_changes():
    size = MoveSize(0.4)
    assert [size.next_move(z) for z in (-9.0, -3.0, -5.0)] == pytest.approx([-0.4, -0.8, -1.6])
    assert size.next_move(-4.0) == -MAX_SIZE
    assert [size.next_move(z) for z in (4.0, -4.0)] == pytest.approx([MAX_SIZE / 2, -MAX_SIZE / 4])
    moves = [size.next_move(sign) for sign in (1.0, -1.0) * 20]
    assert abs(moves[-1]) == pytest.approx(MIN_SIZE / 2)  # z = 1 is half a move


def test_a_z_score_of_0_moves_nothing_and_keeps_the_size():
    size = MoveSize(0.4)
    size.next_move(3.0)
    assert size.next_move(0.0) == 0.0
    assert size == MoveSize(0.4, 1.0)


@pytest.mark.parametrize("objective", [undrop.Dropout, undrop.Analytic])
def test_the_noise_rises_from_zero_to_its_start_before_the_first_trial(objective):
    model, found = network(), []
    tuner = tuner_for(objective(), interval=20)
    for x, y in batches(12, seed=1):
        tuner.step(model, x, y)
        site = tuner.objective.sites(model, x)[0]
        found.append(tuner.objective.selection.sigma(site) ** 2)
    assert found[-1] == found[9] == pytest.approx(10 * found[0])
    assert found[:10] == pytest.approx([(k + 1) * found[0] for k in range(10)])


def test_missing_or_malformed_validation_data_is_refused():
    with pytest.raises(DataError, match="no validation data"):
        undrop.Tuner(undrop.Dropout(), [])
    with pytest.raises(DataError, match="only one validation batch"):
        undrop.Tuner(undrop.Dropout(), batches(1, seed=0))
    with pytest.raises(DataError, match="got Tensor"):
        undrop.Tuner(undrop.Dropout(), torch.zeros(3))
    with pytest.raises(DataError, match="must be a pair"):
        undrop.Tuner(undrop.Dropout(), [torch.zeros(3)])


def test_validation_data_that_training_sees_is_refused():
    data = batches(4, seed=3)
    tuner = undrop.Tuner(undrop.Dropout(), data)
    mixed = torch.cat([x for x, _ in data])[torch.randperm(48)][:12]
    with pytest.raises(DataError, match="12 of 12 examples"):
        tuner.step(network(), mixed, torch.zeros(12, dtype=torch.long))


def test_a_model_without_dropout_is_refused():
    model = nn.Linear(6, 3)
    with pytest.raises(NoDropoutError, match="Linear"):
        tuner_for(undrop.Dropout()).step(model, *batches(1, seed=3)[0])


def test_a_model_whose_dropouts_all_have_p_0_is_refused():
    with pytest.raises(NoDropoutError, match="every dropout of Sequential has p = 0"):
        tuner_for(undrop.Dropout()).step(network(0.0), *batches(1, seed=3)[0])


def test_a_state_of_another_model_or_of_no_tuner_is_refused():
    model, tuner = network(), tuner_for(undrop.Dropout(), interval=2)
    train(tuner, model, sgd(model), batches(4, seed=3))
    with pytest.raises(DataError, match="it lacks earlier, generators, history, log_values"):
        tuner.load_state_dict({"steps": 1, "objective": {}})
    other = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1))
    fresh = tuner_for(undrop.Dropout())
    fresh.load_state_dict(tuner.state_dict())
    with pytest.raises(DataError, match="sites 2, 5, but Sequential has 1"):
        fresh.step(other, *batches(1, seed=3)[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    with pytest.raises(DataError, match="did not adjust weight decay, but this one does"):
        tuner_for(undrop.Dropout(), optimizer=optimizer).load_state_dict(tuner.state_dict())


def test_objectives_without_p_and_invalid_options_are_refused():
    with pytest.raises(OptionError, match="an Analytic or a Dropout objective, got L2"):
        tuner_for(undrop.L2(0.1))
    with pytest.raises(OptionError, match="rate must be positive"):
        tuner_for(undrop.Dropout(), rate=0.0)
    with pytest.raises(OptionError, match="interval"):
        tuner_for(undrop.Dropout(), interval=0)
    with pytest.raises(OptionError, match="training=DATASET"):
        undrop.Tuner(undrop.Dropout(), 0.05)
    with pytest.raises(OptionError, match="leave training= out"):
        undrop.Tuner(undrop.Dropout(), batches(2, seed=0), training=[1, 2])


def test_a_share_of_the_training_set_is_set_aside():
    data = torch.utils.data.TensorDataset(torch.arange(100.0)[:, None], torch.arange(100) % 3)
    tuner = undrop.Tuner(undrop.Dropout(), 0.2, training=data, batch_size=5)
    held = {float(v) for x, _ in tuner.validation.batches for v in x}
    left = {float(tuner.training[i][0]) for i in range(len(tuner.training))}
    assert (len(held), len(left), held & left) == (20, 80, set())
    with pytest.raises(DataError, match="fewer than two batches"):
        set_aside(data, 0.05, batch_size=5)
    with pytest.raises(OptionError, match="between 0 and 1"):
        set_aside(data, 5)


def test_the_table_names_every_site_and_the_figure_has_a_line_for_each(tmp_path):
    pytest.importorskip("matplotlib")
    model, tuner = network(), tuner_for(undrop.Dropout(), interval=2)
    train(tuner, model, sgd(model), batches(10, seed=3))
    text = tuner.table().text()
    assert all(word in text for word in ("2", "5", "benefit"))
    assert len(tuner.history.figure().axes[0].lines) == 2
    with pytest.raises(DataError, match="made no trial yet"):
        tuner_for(undrop.Dropout()).history.figure()
    tuner.history.save_figure(tmp_path / "p.svg")
    assert (tmp_path / "p.svg").stat().st_size > 1000


def test_the_table_formats_all_numbers_of_a_column_alike():
    history = History()
    values = {"input": 0.0984, "layers.10.feedforward.output_dropout": 0.7, "weight decay": 3e-5}
    trials = [
        ("every site", 0.5),
        ("every site", 0.502),
        ("weight decay", -0.00311),
        ("input", 1e-7),
    ]
    for step, (tried, found) in enumerate(trials):
        history.entries.append(Entry(step, tried, found, values))
    assert history.table().text(80).splitlines() == [
        "Mean benefit of the last 10 trials; no evidence: its interval contains 0",
        "site                                      p           benefit  evidence",
        "every site                                   +0.5010 ± 0.0010  more helps",
        "weight decay (λ = 3e-05)                          -0.0031 ± ?  no evidence",
        "input                                 0.098       +0.0000 ± ?  no evidence",
        "layers.10.feedforward.output_dropout  0.700",
    ]


def test_the_figure_shows_weight_decay_in_its_own_panel():
    pytest.importorskip("matplotlib")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    tuner = tuner_for(undrop.Dropout(), interval=2, optimizer=optimizer)
    train(tuner, model, optimizer, batches(10, seed=3))
    sites, decay = tuner.history.figure().axes
    assert (len(sites.lines), len(decay.lines), decay.get_yscale()) == (2, 1, "log")


def test_the_error_of_a_trial_is_at_least_the_standard_deviation_of_the_last_ten():
    history = History()
    one = Estimate.of(0.02, 0.005)
    assert history.z_score(EVERY_SITE, one) == pytest.approx(4.0)
    history.entries = [Entry(100 * k, EVERY_SITE, (-1.0) ** k * 0.02, {}) for k in range(20)]
    spread = statistics.stdev([e.difference for e in history.entries[-9:]] + [0.02])
    assert history.z_score(EVERY_SITE, one) == pytest.approx(0.02 / spread)
    assert history.z_score("another site", one) == pytest.approx(4.0)
    history.entries = [Entry(100, EVERY_SITE, 0.02, {})]
    assert history.z_score(EVERY_SITE, one) == pytest.approx(
        4.0
    )  # no spread: the trial's own error
