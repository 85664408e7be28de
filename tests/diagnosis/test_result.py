"""The text, tables, JSON, plots and page of a diagnosis, and its advice."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import undrop
from device import new_generator
from undrop.diagnosis.measure.benefit import Benefit
from undrop.diagnosis.measure.estimates import Estimate
from undrop.diagnosis.report.advice import conclude, recommend
from undrop.diagnosis.report.comparison import compare_files, compare_json
from undrop.diagnosis.report.verdict import verdict
from undrop.intercept import Sites


class Nasty(nn.Module):
    """A model with names that would break a page that does not escape them."""

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
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(8)]
    return undrop.diagnose(
        Nasty(),
        batches[:6],
        validation=batches[6:],
        learning_rate=0.1,
        seconds=1e3,
        draws=6,
        classes=["<unk>", "&amp;", "$x$"],
        generator=new_generator(0),
        progress=False,
    )


def test_the_json_of_a_diagnosis_has_stable_keys(found, tmp_path):
    found.save(tmp_path / "d.json")
    values = json.loads((tmp_path / "d.json").read_text())
    assert values == json.loads(json.dumps(found.to_json()))
    assert values["format"] == 3
    figure = {"value", "stderr", "low", "high"}
    for part in ("r_drop", "half_quadratic", "curvature", "rest"):
        assert set(values["explicit"]["parts"][part]) == figure
    for name in found.sites.names:
        assert set(values["explicit"]["sites"][name]["share"]) == figure
        assert set(values["benefit"]["sites"][name]) == figure
    for part in ("trace_dropout", "trace_batch", "trace_analytic", "cosine"):
        assert set(values["implicit"][part]) == figure
    assert values["advice"]
    assert all(isinstance(sentence, str) for sentence in values["advice"])
    shares = [site["share"]["value"] for site in values["explicit"]["sites"].values()]
    assert sum(shares) == pytest.approx(1.0)
    origin = values["provenance"]
    assert origin["undrop"] == undrop.__version__
    assert origin["torch"] == torch.__version__
    assert origin["masks"] == found.explicit.masks
    assert origin["data"].startswith("6 batches; the first has inputs 8×4 and targets 8")


def test_the_text_of_a_diagnosis_begins_with_the_conclusion_and_has_every_figure(found):
    text = str(found)
    for words in ("R_drop", "½E[uᵀHu]", "curvature", "rest", "ξ_approx", "<unk>", "benefit"):
        assert words in text
    for name in found.sites.names:
        assert name in text
    order = ["What to do", "Explicit effect", "How it was measured", "Symbols", "Where the numbers"]
    positions = [text.index(found.conclusion.split(".")[0]), *map(text.index, order)]
    assert positions == sorted(positions)
    assert "standard error over masks and batches" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_text_of_a_diagnosis_fits_the_terminal(found, width):
    lines = found.text(width).splitlines()
    assert max(map(len, lines)) <= width


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.sources, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def read(text):
    reader = Reader()
    reader.feed(text)
    return reader


def test_the_html_page_of_a_diagnosis_is_self_contained_and_escaped(found, tmp_path):
    found.html(tmp_path / "d.html")
    reader = read((tmp_path / "d.html").read_text(encoding="utf-8"))
    assert "script" not in reader.tags
    assert "<script>alert(1)</script>" in "".join(reader.text)
    assert "<unk>" in "".join(reader.text)
    assert reader.tags.count("figure") == 7
    assert all(source.startswith("#") for source in reader.sources)
    text = "".join(reader.text)
    assert text.index("Conclusion") < text.index("What to do") < text.index("In pictures")
    assert "Symbols" in text
    assert "Where the numbers come from" in text


def test_every_symbol_in_the_tables_is_explained(found):
    explained = " ".join(" ".join(row) for row in found.glossary().rows)
    shown = " ".join(" ".join(table.headers) + table.text(200) for table in found.tables())
    for symbol in (
        "R_drop",
        "½E[uᵀHu]",
        "ℓ",
        "F",
        "ε",
        "Dℓ",
        "ξ_approx",
        "λ",
        "z",
        "benefit",
        "rest",
    ):
        assert symbol in shown
        assert symbol in explained
    alone = replace(found, benefit=None, implicit=None).glossary().rows
    assert not {"benefit", "z", "λ", "ξ_approx", "trace"} & {symbol for symbol, _ in alone}


def test_a_notebook_shows_the_conclusion_and_tables(found):
    reader = read(found._repr_html_())
    assert "Conclusion" in "".join(reader.text)
    assert reader.tags.count("table") == len(list(found.tables())) + 1  # and the symbols
    assert "script" not in reader.tags


def test_the_frame_of_a_diagnosis_has_one_row_per_site(found):
    pytest.importorskip("pandas")
    frame = found.to_frame()
    assert list(frame.index) == list(found.sites.names)
    assert frame["share"].sum() == pytest.approx(1.0)
    assert {"p", "kind", "share_stderr", "benefit", "benefit_stderr"} <= set(frame.columns)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_diagnosis_draws_its_plots(found, tmp_path, suffix):
    path = tmp_path / f"d.{suffix}"
    found.plot(path)
    assert path.stat().st_size > 10_000


def test_an_unknown_kind_of_picture_is_refused(found, tmp_path):
    with pytest.raises(undrop.errors.OptionError, match=r"d\.xyz can't be drawn.*\.$"):
        found.plot(tmp_path / "d.xyz")


def test_importing_undrop_diagnosis_loads_no_optional_dependency():
    import subprocess
    import sys

    code = (
        "import sys, undrop, undrop.diagnosis.report.plots\n"
        "heavy = {'scipy', 'matplotlib', 'pydantic', 'transformers', 'rich', 'pandas'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert callable(undrop.diagnose) and callable(undrop.bound) and callable(undrop.check)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# comparisons


def test_a_diagnosis_compared_with_itself_has_no_change(found):
    same = found.compare(found)
    assert not any(change.certain for change in same.changes)
    assert all(change.difference.value == 0.0 for change in same.changes if change.difference)
    assert "No figure changed by more than its error" in str(same)


def test_a_comparison_names_what_changed():
    before, after = diagnosed(model_with_shares(1.0)), diagnosed(model_with_shares(9.0))
    found = before.compare(after)
    change = next(change for change in found.changes if change.figure == "R_drop")
    assert change.certain
    parts = [each.explicit.parts.r_drop.value for each in (before, after)]
    assert change.difference.value == pytest.approx(parts[1] - parts[0])
    assert "figures changed by more than their errors" in found.conclusion
    assert "R_drop" in str(found)
    assert "<table" in found._repr_html_()


def test_a_comparison_of_two_kinds_of_model_says_so(found):
    other = replace(found, model="Other")
    said = found.compare(other).conclusion
    assert said.startswith(f"The models differ: {found.model} before, Other after.")
    assert "differ" not in found.compare(found).conclusion


def test_a_comparison_names_p_only_where_it_changed(found):
    other = json.loads(json.dumps(found.to_json()))
    (first, site), *rest = other["explicit"]["sites"].items()
    site["p"] = 0.125
    rows = compare_json(found.to_json(), other).table().rows
    (row,) = [row for row in rows if row[0].startswith("p at")]
    assert rest
    assert row[0] == f"p at {first}"
    assert row[2] == "0.125"


def test_saved_diagnoses_are_compared(found, tmp_path):
    for name in ("a.json", "b.json"):
        found.save(tmp_path / name)
    same = compare_files(tmp_path / "a.json", tmp_path / "b.json")
    assert same.to_json() == found.compare(found).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a diagnosis: give a file that undrop diagnose --save wrote"),
        (
            '{"explicit": {}}',
            "is a diagnosis in format 1, but this version of undrop reads format 3",
        ),
    ],
)
def test_a_file_that_is_not_a_diagnosis_is_refused(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(undrop.errors.DataError, match=message):
        compare_files(tmp_path / "a.json", tmp_path / "a.json")


# advice


def model_with_shares(first):
    """Return a model with two sites; ``first`` scales the weights after the first one, and its share."""
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
    options = {"implicit": False, "seconds": 1e6, "draws": 300, "progress": False}
    return undrop.diagnose(model, pairs, generator=new_generator(0), **options)


def test_a_loss_linear_in_the_output_is_named_as_the_cause():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3), nn.LogSoftmax(-1)]
    model = nn.Sequential(*layers).double()
    found = undrop.diagnose(
        model,
        [(torch.randn(1, 3).double(), torch.tensor([i])) for i in range(3)],
        loss=nn.NLLLoss(),
        implicit=False,
        draws=4,
        progress=False,
    )
    advice = " ".join(found.advice)
    assert re.search(r"2 +0\.5 +–", str(found))  # no share of nothing
    assert "½E[uᵀHu] is 0 for every p, because the loss is linear in the model's output" in advice
    assert "let the model return logits" in advice
    assert "smaller p" not in advice


@pytest.mark.parametrize(("batches", "where"), [(1, "on one batch."), (2, "on 2 of 2 batches.")])
def test_the_notes_say_how_many_batches_were_measured(batches, where):
    assert where in str(diagnosed(model_with_shares(1.0), batches))


def test_a_site_without_effect_is_named_with_its_share():
    advice = diagnosed(model_with_shares(0.01)).advice
    (idle,) = [sentence for sentence in advice if "nothing measurable" in sentence]
    assert re.search(r"Dropout at `2` \(-?0\.\d+ % ± 0\.\d+ %\) adds nothing measurable", idle)
    assert any("can replace the explicit effect of this dropout" in s for s in advice)
    conclusion = diagnosed(model_with_shares(0.01)).conclusion
    assert re.search(
        r"The largest share of ½E\[uᵀHu\], \d+\.\d+ % ± 0\.\d+ %, comes from site `4`\.", conclusion
    )


def test_nothing_is_concluded_that_the_interval_does_not_support():
    found = diagnosed(model_with_shares(1.0))
    unsure = {
        name: effect._replace(share=Estimate.of(effect.share.value, 0.5))
        for name, effect in found.explicit.sites.items()
    }
    explicit = type(found.explicit)(
        **{**vars(found.explicit), "sites": unsure, "quadratic_share": Estimate.of(0.9, 0.3)}
    )
    advice = recommend(found.sites, explicit, None)
    assert not any("adds nothing measurable" in sentence for sentence in advice)
    assert not any("½E[uᵀHu]" in sentence for sentence in advice)
    conclusion = conclude(explicit, None, None)
    assert "too little data to say how well it describes this dropout" in conclusion
    assert "The largest share" not in conclusion


WORDS = {
    "good": "this, so the second-order approximation describes this dropout well.",
    "rough": "of this, so it is a rough description of this dropout.",
    "poor": "this, so the second-order approximation describes this dropout poorly.",
    "unclear": "of this: too little data to say how well it describes this dropout.",
}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.8, 1.25, "good"),
        (0.9, 1.22, "good"),
        (0.79, 1.0, "rough"),
        (1.0, 1.26, "rough"),
        (0.5, 2.0, "rough"),
        (1.6, 1.9, "rough"),
        (0.23, 0.52, "unclear"),
        (1.9, 2.1, "unclear"),
        (0.3, 0.49, "poor"),
        (-0.1, 0.2, "poor"),
        (2.01, 2.5, "poor"),
        (float("-inf"), float("inf"), "unclear"),
    ],
)
def test_a_diagnosis_and_a_check_have_one_rule_for_the_ratio(low, high, expected):
    """The interval decides, and R has the verdict of 1/R."""
    ratio = Estimate(0.5 * (low + high), 0.1, low, high)
    assert verdict(ratio) == expected
    if low > 0.0:
        assert verdict(Estimate(1.0 / ratio.value, 0.1, 1.0 / high, 1.0 / low)) == expected
    found = diagnosed(model_with_shares(1.0))
    explicit = replace(found.explicit, quadratic_share=ratio)
    conclusion = conclude(explicit, None, None)
    if low == float("-inf"):
        assert "Too little data to say how much of this" in conclusion
    else:
        assert WORDS[expected] in conclusion
    advice = " ".join(recommend(found.sites, explicit, None))
    assert ("can replace the explicit effect" in advice) == (expected == "good")
    assert ("differs from this dropout" in advice) == (expected == "poor")


def test_an_r_drop_within_its_error_is_called_too_little_data():
    found = diagnosed(model_with_shares(1.0))
    parts = found.explicit.parts._replace(r_drop=Estimate.of(0.01, 0.02))
    explicit = type(found.explicit)(**{**vars(found.explicit), "parts": parts})
    assert recommend(found.sites, explicit, None)[0].startswith("Too little data to say")
    conclusion = conclude(explicit, None, None)
    assert conclusion.startswith("Too little data to say")
    assert "(95 % interval -0.029 to 0.049)" in conclusion


def test_dropout_that_is_active_in_eval_mode_is_named_first():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return nn.functional.dropout(self.a(x), 0.2)

    found = diagnosed(Forgetful().double())
    assert "`dropout` (p = 0.2) is active in eval mode too" in found.advice[0]
    assert isinstance(found.sites, Sites)


UNKNOWN = Estimate.of(0.0, 1.0)


def advice_for(found, decay=UNKNOWN, **sites):
    """Return the advice if the sites have these benefits."""
    benefit = Benefit(
        sites=sites,
        every_site=Estimate.of(0.1, 0.01),
        weight_decay=decay,
        decay=1e-3,
        steps=20,
        optimizer="SGD",
        learning_rate=0.1,
        repeats=8,
        validation_batches=4,
    )
    return recommend(found.sites, found.explicit, None, benefit)


def test_the_advice_names_an_action_for_each_clear_benefit():
    found = diagnosed(model_with_shares(1.0))
    helps, harms = Estimate.of(0.012, 0.002), Estimate.of(-0.03, 0.01)
    advice = advice_for(found, a=helps, b=harms, c=Estimate.of(0.001, 0.01))
    after = "after 20 steps without it the validation loss is"
    assert advice[0] == f"Keep the dropout at `a` for now: {after} higher by 0.0120 ± 0.0020."
    assert advice[1] == f"Dropout at `b` hurts, so lower its p: {after} lower by 0.030 ± 0.010."
    assert advice[2] == "It is not clear whether dropout at `c` helps: allow more seconds."
    assert not any("Weight decay" in sentence for sentence in advice)


def test_the_advice_lists_at_most_three_sites():
    found = diagnosed(model_with_shares(1.0))
    unclear, unmeasured = Estimate.of(0.001, 0.01), Estimate(float("nan"), None)
    names = [f"s{i}" for i in range(12)]

    def first(**sites):
        return advice_for(found, **sites)[0]

    assert "whether dropout at any site helps" in first(**dict.fromkeys(names, unclear))
    assert "of dropout at any site was measured" in first(**dict.fromkeys(names, unmeasured))
    some = {"a": Estimate.of(0.5, 0.01), **dict.fromkeys(names, unclear)}
    assert "dropout at `s0`, `s1`, `s2` and 9 more helps" in " ".join(advice_for(found, **some))
    assert "whether dropout at `s0` helps" in first(s0=unclear)


def test_many_weak_sites_are_not_all_called_useless():
    found = diagnosed(model_with_shares(1.0))
    (site, *_) = found.explicit.sites.values()
    weak = {f"s{i}": site._replace(share=Estimate.of(0.005, 1e-4)) for i in range(200)}
    advice = " ".join(recommend(found.sites, replace(found.explicit, sites=weak), None))
    assert "nothing measurable" not in advice
    strong = {"a": site._replace(share=Estimate.of(0.9, 1e-4)), **weak}
    advice = " ".join(recommend(found.sites, replace(found.explicit, sites=strong), None))
    assert re.search(r"Dropout at (`s\d` \([^)]*\)(, )?){3} and 197 more adds nothing", advice)


def test_a_diagnosis_rounds_p():
    found = diagnosed(model_with_shares(1.0))
    sites = {name: s._replace(p=1 / 15) for name, s in found.explicit.sites.items()}
    text = replace(found, explicit=replace(found.explicit, sites=sites)).text(100)
    assert "0.0667" in text
    assert "0.06666" not in text


def test_weight_decay_is_compared_with_the_best_site():
    found = diagnosed(model_with_shares(1.0))
    site = Estimate.of(0.012, 0.002)
    (more,) = [s for s in advice_for(found, Estimate.of(0.5, 0.01), a=site) if "decay" in s]
    lowers = "λ = 0.001 lowers the validation loss after 20 steps by 0.500 ± 0.01"
    assert more.startswith(f"Weight decay helps more than any dropout here: {lowers}")
    (as_well,) = [s for s in advice_for(found, Estimate.of(0.01, 0.001), a=site) if "decay" in s]
    assert as_well.startswith("Weight decay helps as well")
    (harms,) = [s for s in advice_for(found, Estimate.of(-0.5, 0.01), a=site) if "decay" in s]
    assert harms.startswith("More weight decay would hurt: λ = 0.001 raises the validation loss")
    assert harms.endswith("by 0.500 ± 0.010.")


def test_advice_is_never_empty():
    found = diagnosed(model_with_shares(1.0))
    nothing = Estimate(0.0, None)
    parts = type(found.explicit.parts)(nothing, nothing, nothing, nothing)
    explicit = replace(found.explicit, parts=parts, curve=[], sites={})
    assert recommend(found.sites, explicit, None)


def test_sites_are_a_table_in_a_notebook_and_a_frame(found):
    reader = read(found.sites._repr_html_())
    assert reader.tags.count("tr") == 1 + len(found.sites)
    assert "<script>alert(1)</script>" in "".join(reader.text)
    pytest.importorskip("pandas")
    assert list(found.sites.to_frame()["p"]) == [0.5, 0.5]
