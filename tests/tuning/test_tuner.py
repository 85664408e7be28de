"""A tuner moves p by the evidence, resumes bit for bit, and refuses what it can't tune on."""

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
from undrop.tuning.history import EVERY, Entry, History
from undrop.tuning.rule import LARGEST, SMALLEST, Pace, log_odds
from undrop.tuning.trial import Outcome

OBJECTIVES = {
    "analytic": lambda: undrop.Analytic(engine="antithetic", generator=new_generator(1)),
    "dropout": lambda: undrop.Dropout(generator=new_generator(1)),
}
BELOW, UNCLEAR, ABOVE = (Estimate.of(value, 0.1) for value in (-1.0, 0.0, 1.0))
"""How far the validation loss is above the training loss."""


def network(p=0.2):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 24), nn.Tanh(), nn.Dropout(p)),
        *(nn.Linear(24, 24), nn.Tanh(), nn.Dropout(p), nn.Linear(24, 3)),
    )


class Own(nn.Dropout):
    """Not torch's own class, so its p is not set."""


def batches(count, seed, rows=12, noise=0.0):
    """Classes that depend on the first inputs; the label is random for a share of the rows."""
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
def test_p_of_every_site_moves_within_a_plain_loop_and_reaches_the_objective(name):
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


def test_torchs_own_modules_take_the_tuned_p_for_a_pass_and_drop_the_same():
    """The same numbers as by interception, which a model with another kind of site needs."""
    x, y = batches(1, seed=3)[0]
    objective, losses = undrop.Dropout(), []
    objective.site_p = {"2": 0.3, "5": 0.6}
    for model in (network(), nn.Sequential(*network()[:5], Own(0.2), network()[6])):
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
def test_a_trial_leaves_weights_gradients_buffers_and_random_states_alone(name):
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
    """The gap of each trial is on training batches of the trial before."""
    outcome, earlier = Outcome(Estimate.of(1.0, 0.1), UNCLEAR), []

    def compare(*arguments):
        earlier.append(arguments[-1])
        return outcome

    model, tuner = network(), tuner_for(undrop.Dropout(), interval=20)
    monkeypatch.setattr("undrop.tuning.tuner.compare", compare)
    data = batches(60, seed=3)
    train(tuner, model, sgd(model), data[:40])
    assert list(tuner.probabilities.values()) == [pytest.approx(0.1)] * 2
    outcome = outcome._replace(gap=ABOVE)
    train(tuner, model, sgd(model), data[40:])
    assert tuner.probabilities["2"] > 0.15
    assert [len(each) for each in earlier] == [0, 4, 4]
    assert [x for x, _ in earlier[1]] == [x for x, _ in data[16:20]]


def test_nothing_falls_below_its_start_while_the_model_overfits(monkeypatch):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    tuner = tuner_for(undrop.Dropout(), interval=2, optimizer=optimizer)
    outcome = Outcome(Estimate.of(-1.0, 0.1), UNCLEAR)
    monkeypatch.setattr("undrop.tuning.tuner.compare", lambda *_: outcome)
    train(tuner, model, optimizer, batches(8, seed=3))
    assert max(tuner.probabilities.values()) < 0.05
    assert optimizer.param_groups[0]["weight_decay"] < 5e-3
    resumed = tuner_for(undrop.Dropout(), interval=2, optimizer=optimizer)
    resumed.load_state_dict(tuner.state_dict())
    outcome = outcome._replace(gap=ABOVE)
    train(resumed, model, optimizer, batches(2, seed=14))
    assert list(resumed.probabilities.values()) == [pytest.approx(0.1)] * 2
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(1e-2)
    outcome = Outcome(Estimate.of(1.0, 0.1), ABOVE)
    train(resumed, model, optimizer, batches(4, seed=15))
    assert min(resumed.probabilities.values()) > 0.1


def test_weight_decay_falls_while_the_validation_loss_is_clearly_below_the_training_loss(
    monkeypatch,
):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    tuner = tuner_for(undrop.Dropout(), interval=2, optimizer=optimizer)
    outcome, found = Outcome(Estimate.of(0.0, 0.1), UNCLEAR), []
    monkeypatch.setattr("undrop.tuning.tuner.compare", lambda *_: outcome)
    for gap in (UNCLEAR, BELOW, BELOW, UNCLEAR, ABOVE):
        outcome = outcome._replace(gap=gap)
        train(tuner, model, optimizer, batches(2, seed=3))
        found.append(optimizer.param_groups[0]["weight_decay"])
    assert found == pytest.approx([1e-2, 1e-2 / 3, 1e-2 / 9, 1e-2 / 9, 1e-2])
    assert list(tuner.probabilities.values()) == [pytest.approx(0.1)] * 2


def test_weights_that_do_not_move_make_no_trial():
    model, tuner = network(), tuner_for(undrop.Dropout(), interval=3)
    for x, y in batches(9, seed=3):
        tuner.step(model, x, y).backward()  # and no optimizer's step
    assert tuner.history.entries == []
    assert list(tuner.probabilities.values()) == [pytest.approx(0.1)] * 2


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(OptionError, match="works in one process, and there are 2"):
        tuner_for(undrop.Dropout()).step(network(), *batches(1, seed=3)[0])


@pytest.mark.parametrize("cut", [19, 26])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resumed_run_is_the_same_to_the_bit(name, cut):
    """Step 19 lies before the steps that a trial repeats, step 26 among them."""
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


def test_the_state_survives_being_written_as_json_and_tensors():
    from undrop.tensor_files import from_bytes, to_bytes

    model, tuner = network(), tuner_for(undrop.Dropout(), interval=2)
    train(tuner, model, sgd(model), batches(6, seed=3))
    other = tuner_for(undrop.Dropout(), interval=2)
    other.load_state_dict(from_bytes(to_bytes(tuner.state_dict())))
    assert other.probabilities == tuner.probabilities
    assert other.history.entries == tuner.history.entries


def test_weight_decay_is_tuned_beside_the_sites_if_an_optimizer_is_given():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    tuner = tuner_for(undrop.Dropout(), interval=2, optimizer=optimizer)
    train(tuner, model, optimizer, batches(30, seed=3))
    assert optimizer.param_groups[0]["weight_decay"] != 1e-2
    assert "weight decay" in tuner.history.benefits()
    assert "weight decay" not in tuner.probabilities
    assert tuner.figures()["weight decay"] == optimizer.param_groups[0]["weight_decay"]
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
        random, pace, value = new_generator(seed), Pace(rate), log_odds(start)
        for _ in range(8):
            value += pace.move(best - value + float(torch.randn((), generator=random)))
        errors.append(abs(value - best))
    assert sum(errors) / 100 < 0.75  # the starts are off by 1.2, 0.3 and 2.1


def test_moves_grow_while_trials_agree_and_shrink_when_they_do_not():
    pace = Pace(0.4)
    assert [pace.move(z) for z in (-9.0, -3.0, -5.0)] == pytest.approx([-0.4, -0.8, -1.6])
    assert pace.move(-4.0) == -LARGEST
    assert [pace.move(z) for z in (4.0, -4.0)] == pytest.approx([LARGEST / 2, -LARGEST / 4])
    moves = [pace.move(sign) for sign in (1.0, -1.0) * 20]
    assert abs(moves[-1]) == pytest.approx(SMALLEST / 2)  # z = 1 is half a move


def test_a_trial_without_evidence_moves_nothing_and_changes_nothing():
    pace = Pace(0.4)
    pace.move(3.0)
    assert pace.move(0.0) == 0.0
    assert pace == Pace(0.4, 1.0)


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


def test_no_validation_data_is_refused():
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


def test_a_state_of_something_else_is_refused():
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
    with pytest.raises(DataError, match="the saved run left weight decay and this tuner tunes it"):
        tuner_for(undrop.Dropout(), optimizer=optimizer).load_state_dict(tuner.state_dict())


def test_objectives_and_options_that_can_not_be_tuned_are_refused():
    with pytest.raises(OptionError, match="adjusts Analytic and Dropout, got L2"):
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


def test_the_table_writes_every_figure_of_a_column_in_the_same_way():
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
        "site                                      p           benefit  evidence",
        "every site                                   +0.5010 ± 0.0010  more helps",
        "weight decay (λ = 3e-05)                          -0.0031 ± ?  no evidence",
        "input                                 0.098       +0.0000 ± ?  no evidence",
        "layers.10.feedforward.output_dropout  0.700",
    ]


def test_weight_decay_is_drawn_apart_from_p():
    pytest.importorskip("matplotlib")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    tuner = tuner_for(undrop.Dropout(), interval=2, optimizer=optimizer)
    train(tuner, model, optimizer, batches(10, seed=3))
    sites, decay = tuner.history.figure().axes
    assert (len(sites.lines), len(decay.lines), decay.get_yscale()) == (2, 1, "log")


def test_the_error_of_a_trial_is_at_least_the_spread_of_the_last_ten():
    history = History()
    one = Estimate.of(0.02, 0.005)
    assert history.z_score(EVERY, one) == pytest.approx(4.0)
    history.entries = [Entry(100 * k, EVERY, (-1.0) ** k * 0.02, {}) for k in range(20)]
    spread = statistics.stdev([e.difference for e in history.entries[-9:]] + [0.02])
    assert history.z_score(EVERY, one) == pytest.approx(0.02 / spread)
    assert history.z_score("another site", one) == pytest.approx(4.0)
    history.entries = [Entry(100, EVERY, 0.02, {})]
    assert history.z_score(EVERY, one) == pytest.approx(4.0)  # no spread: the trial's own error
