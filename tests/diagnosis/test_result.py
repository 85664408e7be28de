"""What a diagnosis says: table, JSON, plots and page."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import undrop
from undrop.diagnosis.measure.estimates import Draws, Estimate, percent
from undrop.diagnosis.report.advice import advise
from undrop.intercept import Sites


class Nasty(nn.Module):
    """A model whose names would break a careless page."""

    def __init__(self):
        super().__init__()
        names = ("<script>alert(1)</script>", "a$b_c$")
        self.a, self.b = nn.Linear(4, 20), nn.Linear(20, 3)
        for name in names:
            self.add_module(name, nn.Dropout(0.5))
        self.names = names

    def forward(self, x):
        h = self.get_submodule(self.names[0])(torch.tanh(self.a(x)))
        return self.b(self.get_submodule(self.names[1])(h))


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(6)]
    return undrop.diagnose(
        Nasty(),
        batches,
        seconds=1e3,
        draws=6,
        classes=["<unk>", "&amp;", "$x$"],
        generator=torch.Generator().manual_seed(0),
        progress=False,
    )


def test_json_has_the_stable_keys(found, tmp_path):
    found.save(tmp_path / "d.json")
    values = json.loads((tmp_path / "d.json").read_text())
    assert values == json.loads(json.dumps(found.to_json()))
    figure = {"value", "stderr"}
    for part in ("r_drop", "psd", "non_psd", "rest"):
        assert set(values["explicit"][part]) == figure
    for name in found.sites.names:
        assert set(values["explicit"]["sites"][name]["share"]) == figure
    for part in ("trace_dropout", "trace_batch", "trace_analytic", "cosine"):
        assert set(values["implicit"][part]) == figure
    assert all(isinstance(sentence, str) for sentence in values["advice"])
    assert values["stderr_over"] == "masks and batches"
    assert sum(s["share"]["value"] for s in values["explicit"]["sites"].values()) == pytest.approx(
        1
    )


def test_the_table_has_every_figure(found):
    text = str(found)
    for words in ("R_drop", "½E[uᵀHu]", "non-PSD", "what Taylor misses", "ξ_approx", "<unk>"):
        assert words in text
    for name in found.sites.names:
        assert name in text
    assert "What to do" in text
    assert "standard error over masks and batches" in text


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.sources, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_escaped(found, tmp_path):
    found.html(tmp_path / "d.html")
    text = (tmp_path / "d.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    assert "script" not in reader.tags
    assert "<script>alert(1)</script>" in "".join(reader.text)
    assert "<unk>" in "".join(reader.text)
    assert reader.tags.count("img") == 6
    assert all(source.startswith("data:image/svg+xml;base64,") for source in reader.sources)
    assert not re.search(r"https?://", re.sub(r"base64,[^\"]+", "", text))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plots_are_drawn(found, tmp_path, suffix):
    path = tmp_path / f"d.{suffix}"
    found.plot(path)
    assert path.stat().st_size > 10_000


def test_an_unknown_kind_of_picture_is_named(found, tmp_path):
    with pytest.raises(undrop.errors.OptionError, match=r"d\.xyz can't be drawn.*\.$"):
        found.plot(tmp_path / "d.xyz")


def test_import_is_light_and_the_name_is_a_function():
    import subprocess
    import sys

    code = (
        "import sys, undrop, undrop.diagnosis.report.page\n"
        "heavy = {'scipy', 'matplotlib', 'pydantic', 'transformers', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert callable(undrop.diagnose) and callable(undrop.bound) and callable(undrop.check)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# advice


def model_with_shares(first):
    """Two sites; the first's weights are scaled, and with them its share."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.1), nn.Linear(5, 4), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[3].weight.mul_(first)
        model[3].bias.fill_(1.0)
    return model


def diagnosed(model, batches=1):
    torch.manual_seed(1)
    pairs = [(torch.randn(1, 3).double(), torch.tensor([i % 3])) for i in range(batches)]
    return undrop.diagnose(model, pairs, implicit=False, progress=False)


def test_a_loss_that_is_linear_in_the_output_is_told_from_a_large_p():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3), nn.LogSoftmax(-1)]
    model = nn.Sequential(*layers).double()
    found = undrop.diagnose(
        model,
        [(torch.randn(1, 3).double(), torch.tensor([i])) for i in range(3)],
        loss=nn.NLLLoss(),
        implicit=False,
        progress=False,
    )
    advice = " ".join(found.advice)
    assert re.search(r"2 +0\.5 +– ", str(found))  # no share of nothing
    assert "½E[uᵀHu] is 0 whatever p, since the loss is linear in the model's output" in advice
    assert "let the model return logits" in advice
    assert "smaller p" not in advice


@pytest.mark.parametrize(("batches", "where"), [(1, "on one batch,"), (2, "on 2 batches,")])
def test_one_batch_is_no_batches(batches, where):
    assert where in str(diagnosed(model_with_shares(1.0), batches))


def test_a_site_that_does_nothing_is_named_with_its_figure():
    advice = diagnosed(model_with_shares(0.01)).advice
    (idle,) = [sentence for sentence in advice if "nothing measurable" in sentence]
    assert re.search(r"Dropout at `2` \(0\.\d %\) adds nothing measurable", idle)
    assert any(re.fullmatch(r"\d+\.\d % of the explicit effect is at `4`\.", s) for s in advice)
    assert any("The quadratic picture holds: ½E[uᵀHu] is " in sentence for sentence in advice)


def test_what_the_error_does_not_bear_out_is_not_said():
    found = diagnosed(model_with_shares(1.0))
    unsure = {
        name: effect._replace(share=Estimate(effect.share.value, 0.5))
        for name, effect in found.explicit.sites.items()
    }
    explicit = type(found.explicit)(
        **{**vars(found.explicit), "sites": unsure, "quadratic_share": Estimate(0.9, 0.3)}
    )
    advice = advise(found.sites, explicit, None)
    assert not any("explicit effect is at" in sentence for sentence in advice)
    assert not any("quadratic picture" in sentence for sentence in advice)


def test_an_effect_within_its_error_is_called_unknown():
    found = diagnosed(model_with_shares(1.0))
    parts = found.explicit.parts._replace(r_drop=Estimate(0.01, 0.02))
    explicit = type(found.explicit)(**{**vars(found.explicit), "parts": parts})
    assert "can't be told from zero" in advise(found.sites, explicit, None)[0]


def test_dropout_in_eval_mode_is_called_a_mistake():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return nn.functional.dropout(self.a(x), 0.2)

    found = diagnosed(Forgetful().double())
    assert "`dropout` (p = 0.2) is active in eval mode too" in found.advice[0]
    assert isinstance(found.sites, Sites)


# standard errors


def test_the_error_is_the_larger_of_the_two_ways():
    table = Draws()
    for batch, values in enumerate([[1.0, 3.0], [2.0, 2.0]]):
        for value in values:
            table.add(batch, 1.0, {"x": value})
    # between batches there is no spread at all, within the first there is
    assert table.mean("x") == Estimate(2.0, pytest.approx((0.25 * 2.0 / 2) ** 0.5))
    table = Draws()
    for batch, value in enumerate([1.0, 1.0, 4.0, 4.0]):
        table.add(batch // 2 if batch < 2 else 1, 1.0, {"x": value})
    assert table.mean("x") == Estimate(2.5, pytest.approx(1.5))


def test_a_ratio_has_the_error_of_its_linearisation():
    torch.manual_seed(0)
    spread = []
    for _ in range(200):
        table = Draws()
        for x in torch.randn(100).tolist():
            table.add(0, 1.0, {"a": 2.0 + x, "b": 4.0 + 0.5 * x})
        spread.append(table.ratio({"a": 1.0}, {"b": 1.0}))
    values = torch.tensor([e.value for e in spread])
    claimed = torch.tensor([e.stderr for e in spread]).mean().item()
    assert values.mean().item() == pytest.approx(0.5, abs=0.01)
    assert claimed == pytest.approx(values.std().item(), rel=0.15)


def test_rows_may_lack_figures():
    table = Draws()
    table.add(0, 1.0, {"a": 1.0, "b": 1.0})
    table.add(0, 1.0, {"a": 3.0})
    assert table.mean("a").value == 2.0
    assert table.linear({"a": 1.0, "b": 1.0}) == Estimate(2.0, None)
    assert "b" in table
    assert "c" not in table


def test_estimates_read_well():
    assert str(Estimate(0.0531234, 0.00123)) == "0.0531 ± 0.0012"
    assert str(Estimate(12.3, None)) == "12.3 ± ?"
    assert str(Estimate(0.25, 0.0)) == "0.25 (exact)"
    assert percent(Estimate(0.834, 0.021)) == "83 % ± 2.1 %"
    assert Estimate(float("nan"), None).to_json() == {"value": None, "stderr": None}


@pytest.mark.parametrize(
    ("whole", "shown"),
    [
        (Estimate(0.03, 0.01), "-256 % ± 3 %"),
        (Estimate(-0.03, 0.01), "-256 % ± 3 %"),
        (Estimate(0.019, 0.01), "–"),
        (Estimate(-0.019, 0.01), "–"),
        (Estimate(0.03, None), "–"),
        (Estimate(0.0, 0.0), "–"),
    ],
)
def test_a_share_of_what_is_not_told_from_0_is_a_dash(whole, shown):
    assert percent(Estimate(-2.56, 0.03), of=whole) == shown


def test_a_share_that_is_none_is_a_dash():
    assert percent(Estimate(math.nan, None)) == "–"
