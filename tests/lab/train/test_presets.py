import pytest

from undrop.errors import ConfigError, OptionError, UnknownNameError
from undrop.lab.cli import _names
from undrop.lab.train import configure, merge, presets
from undrop.lab.train.config import parse_override

PAPER = ("ptb-awd-lstm", "wt2-awd-lstm", "wt103-transformer-xl", "wt103-qrnn")


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_valid_config_with_a_description(name):
    assert configure(name).preset == name
    assert len(_names.presets()[name]) > 20


def test_each_setting_of_the_paper_has_a_full_and_a_small_preset():
    assert {*PAPER, *(f"{name}-small" for name in PAPER), "ptb-lstm-tiny"} <= set(presets())


def test_paper_presets_have_the_papers_settings():
    ptb, wt2 = configure("ptb-awd-lstm"), configure("wt2-awd-lstm")
    for config in (ptb, wt2):
        assert (config.optimizer.name, config.optimizer.lr) == ("sgd", 30.0)
        assert (config.optimizer.clip, config.optimizer.weight_decay) == (0.35, 1.2e-6)
        drops = {k: v for k, v in config.model.options.items() if k.endswith("dropout")}
        assert drops.pop("embedding_dropout") == 0.0
        assert set(drops.values()) == {0.4}
    assert (ptb.data.batch_size, ptb.train.epochs) == (20, 150)
    assert (wt2.data.batch_size, wt2.train.epochs) == (40, 100)
    qrnn, xl = configure("wt103-qrnn"), configure("wt103-transformer-xl")
    assert (qrnn.optimizer.name, qrnn.optimizer.lr, qrnn.data.batch_size) == ("adam", 5e-4, 15)
    assert (xl.model.options["layers"], xl.model.options["dropout"]) == (16, 0.1)


def test_overrides_change_any_setting():
    config = configure(
        "ptb-awd-lstm",
        {"objective": {"name": "analytic"}},
        ["optimizer.lr=5", "model.hidden_size=7", "optimizer.clip=null", "data.name=wikitext-2"],
    )
    assert (config.optimizer.lr, config.optimizer.clip) == (5.0, None)
    assert config.model.options["hidden_size"] == 7
    assert config.data.name == "wikitext-2"
    assert config.objective.options["explicit"] == "hessian"


def test_another_objective_drops_the_options_of_the_previous_one():
    base = {"objective": {"name": "analytic", "samples": 3}, "optimizer": {"lr": 2.0}}
    assert merge(base, {"objective": {"name": "dropout"}})["objective"] == {"name": "dropout"}
    kept = merge(base, {"objective": {"strength": 0.5}})["objective"]
    assert kept == {"name": "analytic", "samples": 3, "strength": 0.5}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a.b=1e-3", 1e-3),
        ("a.b=true", True),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=null", None),
        ("a.b=word", "word"),
        ("a.b='1'", "1"),
        ("a.b = x=y", "x=y"),
        ("a.b=", ""),
        pytest.param(f"a.b={'9' * 5000}", "9" * 5000, id="5000 digits"),
    ],
)
def test_an_override_value_is_toml_or_a_string(text, value):
    assert parse_override(text) == {"a": {"b": value}}


@pytest.mark.parametrize("text", ["", "a", "a=1", ".b=1", "a.=1"])
def test_an_override_without_section_and_key_is_refused(text):
    with pytest.raises(ConfigError, match=r"--set takes section.key=value"):
        parse_override(text)


def test_an_unknown_preset_suggests_the_closest_name():
    with pytest.raises(UnknownNameError, match="did you mean 'ptb-awd-lstm'"):
        configure("ptb-awd-lsmt")


def test_your_own_toml_file_is_a_preset(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('extends = "ptb-awd-lstm"\n[optimizer]\nlr = 3.0\n')
    mine, base = configure(str(file)), configure("ptb-awd-lstm")
    assert (mine.optimizer.lr, mine.preset) == (3.0, str(file))
    assert mine.model == base.model


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"mine.toml can't be read: No such file"),
        (b"[optimizer\n", r"mine.toml is not valid TOML: .*line 1"),
        (b"\xff", r"mine.toml is not valid TOML: .*utf-8"),
        (b"a = " + b"[" * 10_000, r"mine.toml is not valid TOML"),
        (b"extends = 'mine.toml'", r"unknown preset 'mine.toml': there are demo, "),
        (
            b"extends = 'dmo'",
            r"'dmo': did you mean 'demo'\? There are .* for .*mine.toml to extend.",
        ),
        (
            b"extends = ['demo']",
            r"extends in .*mine.toml must be the name of a preset, got \['demo'\].",
        ),
        (b"[optimiser]\nlr = 1", r"optimiser"),
    ],
)
def test_an_invalid_preset_file_is_named(tmp_path, content, message):
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=message):
        configure(str(file))
