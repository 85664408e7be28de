"""GPT: sizes, context and dropout in the fused attention."""

import pytest
import torch
import torch.nn.functional as F

from undrop.errors import OptionError
from undrop.lab.models import GPT

SMALL = {"size": 8, "layers": 2, "heads": 2, "context": 6}


def test_gpt_defaults_are_the_smallest_gpt_2():
    with torch.device("meta"):
        model = GPT(50_257)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_gpt_attention_matches_its_definition():
    torch.manual_seed(0)
    attention = GPT(30, **SMALL).double().eval().layers[0].attention
    x = torch.randn(5, 3, 8, dtype=torch.double)
    query, key, value = attention.query_key_value(x).chunk(3, -1)
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        scores = torch.einsum("ibd,jbd->bij", query[..., part], key[..., part]) / 2.0
        past = torch.ones(5, 5, dtype=torch.bool).tril()
        weights = scores.masked_fill(~past, -torch.inf).softmax(-1)
        heads.append(torch.einsum("bij,jbd->ibd", weights, value[..., part]))
    torch.testing.assert_close(attention(x), attention.output(torch.cat(heads, -1)))


def test_attention_drops_in_training_only(monkeypatch):
    seen = []
    real = F.scaled_dot_product_attention

    def spy(*args, dropout_p, **kwargs):
        seen.append(dropout_p)
        return real(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model = GPT(30, **SMALL, attention_dropout=0.3)
    tokens = torch.zeros(4, 2, dtype=torch.long)
    model(tokens)
    model.eval()(tokens)
    assert seen == [0.3, 0.3, 0.0, 0.0]


def test_gpt_sees_positions_and_carries_no_state():
    torch.manual_seed(0)
    model = GPT(30, **SMALL).eval()
    features, state = model(torch.full((4, 1), 3), logits=False)
    assert state == ()
    assert not torch.allclose(features[0], features[3])


def test_a_window_longer_than_the_context_is_refused():
    with pytest.raises(OptionError, match="at most 6 steps long, the model's context, got 7"):
        GPT(30, **SMALL)(torch.zeros(7, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"heads": 3}, "heads must divide size=8, got 3"),
        ({"context": 0}, "context must be a whole number of at least 1, got 0"),
        ({"layers": -1}, "layers must be a whole number of at least 1, got -1"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1\.0"),
        ({"attention_dropout": -1}, r"attention_dropout must lie in \[0, 1\), got -1"),
    ],
)
def test_invalid_options_of_gpt_raise_errors_that_name_them(option, message):
    with pytest.raises(OptionError, match=message):
        GPT(30, **{**SMALL, **option})
