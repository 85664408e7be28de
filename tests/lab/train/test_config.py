from functools import partial

import pytest

from undrop.errors import ConfigError
from undrop.lab.train import OBJECTIVES, Config


def test_the_default_config_round_trips_through_its_dict():
    config = Config.parse({})
    assert config.model.options["hidden_size"] == 1150
    assert Config.parse(config.as_dict()) == config


def test_component_options_default_to_the_constructors():
    config = Config.parse({"objective": {"name": "drop-k", "k": 4}})
    assert config.objective.options["k"] == 4
    assert config.objective.options["noise"] is None
    assert Config.parse({"objective": {"name": "explicit"}}).objective.options["implicit"] is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimizer": {"lrr": 1}},
            "unknown setting 'optimizer.lrr': did you mean 'optimizer.lr'?",
        ),
        ({"model": {"hiden_size": 1}}, "did you mean 'model.hidden_size'?"),
        (
            {"objective": {"name": "analitic"}},
            "unknown objective 'analitic': did you mean 'analytic'",
        ),
        ({"model": {"name": "lstm"}}, "unknown model 'lstm': did you mean 'awd-lstm'?"),
        ({"optimizer": {"lr": 0}}, r"optimizer\.lr must be greater than 0, got 0\."),
        ({"optimizer": {"lr": float("nan")}}, r"optimizer\.lr must be a finite number, got nan\."),
        ({"optimizer": {"name": "sdg"}}, "optimizer.name must be 'sgd', 'asgd', 'adam' or 'adamw'"),
        ({"data": {"fraction": 1.5}}, "data.fraction must be less than or equal to 1, got 1.5"),
        ({"train": {"epochs": "many"}}, "train.epochs must be a valid integer, got 'many'"),
        (
            {"objective": {"name": "drop-k", "k": "x"}},
            "objective.k must be a valid integer, got 'x'",
        ),
        ({"objective": {"strength": 1}}, "unknown setting 'objective.strength'"),
        ({"optimizer": {"betas": [0.9]}}, r"optimizer\.betas\.1 must be given"),
        ({"modle": {}}, "unknown setting 'modle': did you mean 'model'?"),
        ({"model": 3}, "model must be a valid dictionary.*got 3"),
        ({"model": {"name": 3}}, "model.name must be a string, got 3"),
        ({"model": {"layers": True}}, r"model.layers must be a number and not a boolean, got True"),
        ({"train": {"epochs": True}}, "train.epochs must be a number and not a boolean"),
        ({"optimizer": {"lr": False}}, "optimizer.lr must be a number and not a boolean"),
        ({"optimizer": {"betas": [True, 0.5]}}, r"optimizer.betas must be a number and not a bool"),
        (
            {"model": {"hidden_size": 10**30}},
            "model.hidden_size must be a smaller number, got 10000",
        ),
        (
            {"model": {"hidden_size": 10**5000}},
            r"smaller number, got a number with thousands of dig",
        ),
        ({"model": {"hidden_size": "9" * 5000}}, r"hidden_size must be .*, got '9{59}…\.$"),
        ({"train": {"threads": 10**6}}, "train.threads must be less than or equal to 1024"),
    ],
)
def test_an_invalid_setting_is_named_with_its_value_and_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config.parse(settings)


def test_the_digest_depends_only_on_settings_that_affect_the_result():
    plain = Config.parse({})
    moved = {"preset": "x", "data": {"dir": "/d"}, "train": {"log_every": 3, "tensorboard": True}}
    assert Config.parse(moved).digest() == plain.digest()
    assert Config.parse({"train": {"seed": 2}}).digest() != plain.digest()
    assert Config.parse({"objective": {"name": "none"}}).digest() != plain.digest()


def bare(weight, *, loss=None, batch_dim=0): ...


def without_loss(weight: float): ...


def numbered(*weights: float): ...


def open_ended(weight: float, **options: float): ...


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (bare, "argument 'weight' of bare has no annotation.*: annotate it, such as weight: float"),
        (partial(bare, weight=1.0), "argument 'weight' of bare has no annotation"),
        (without_loss, "without_loss has no argument 'loss', which the trainer passes: add it"),
        (
            numbered,
            r"numbered has the argument \*weights, which .*: write the arguments out .* as loss",
        ),
        (
            open_ended,
            r"open_ended has the argument \*\*options, which .*: write the arguments out .* as loss",
        ),
    ],
)
def test_a_constructor_that_a_config_cannot_check_is_named_with_its_argument(
    factory, message, monkeypatch
):
    monkeypatch.setitem(OBJECTIVES._entries, "mine", factory)
    with pytest.raises(ConfigError, match=message):
        Config.parse({"objective": {"name": "mine", "weight": 0.5}})
