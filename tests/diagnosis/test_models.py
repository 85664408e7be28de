"""Models of many kinds: Transformers', torch's own, a ConvNet, a recurrent language model."""

import pytest
import torch
from torch import nn

import undrop
from undrop.lab.models import AWDLSTM, ConvNet


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    tokens = torch.randint(50, (3, 8))
    batch = {"input_ids": tokens}, tokens
    return transformers.GPT2LMHeadModel(config), [batch] * 2, {}


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )
    inputs = {"input_ids": torch.randint(50, (4, 8)), "attention_mask": torch.ones(4, 8)}
    batch = inputs, torch.tensor([0, 1, 2, 0])
    return transformers.BertForSequenceClassification(config), [batch] * 2, {}


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 5))
    batch = torch.randn(3, 6, 16), torch.randint(5, (3, 6))
    return model, [batch] * 2, {}


def convnet():
    model = ConvNet(1, 4, widths=(6, 8), batch_norm=True)
    return model, [(torch.randn(6, 1, 8, 8), torch.randint(4, (6,))) for _ in range(2)], {}


def language_model():
    model = AWDLSTM(40, embedding_size=12, hidden_size=16, layers=2)
    tokens = torch.randint(40, (8, 3))
    inputs = {"tokens": tokens[:-1], "state": None, "logits": False}
    options = {"loss": model.loss(), "batch_dim": 1, "classes": [f"w{i}" for i in range(40)]}
    return model, [(inputs, tokens[1:])] * 2, options


SITES = {gpt2: 7, bert: 8, encoder: 8, convnet: 3, language_model: 5}


@pytest.mark.parametrize("make", SITES, ids=lambda make: make.__name__)
def test_diagnose_measures_models_of_many_kinds(make):
    torch.manual_seed(0)
    model, batches, options = make()
    found = undrop.diagnose(model, batches, seconds=1e3, draws=4, progress=False, **options)
    explicit = found.explicit
    assert len(explicit.sites) == SITES[make]
    assert explicit.differences is None
    assert explicit.parts.half_quadratic.value > 0.0
    assert sum(effect.share.value for effect in explicit.sites.values()) == pytest.approx(1.0)
    assert explicit.classes
    assert found.implicit.trace_dropout.value > 0.0
    ratio = found.implicit.analytic_ratio
    assert 0.3 < ratio.value < 3.0
    # a newly initialized model is nearly linear in its noise: second order is nearly all
    parts = explicit.parts
    second = parts.half_quadratic.value + parts.curvature.value
    assert abs(parts.rest.value) <= 0.5 * abs(second) + 4 * parts.rest.stderr
    exact = undrop.Analytic(engine="reverse", implicit=False, loss=options.get("loss"), samples=8)
    inputs, targets = batches[0]
    model.train()
    explicit_part = exact(model, inputs, targets).parts["explicit"]
    assert explicit_part == pytest.approx(2 * parts.half_quadratic.value, rel=0.6)
