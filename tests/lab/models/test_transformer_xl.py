"""Transformer-XL: relative attention against its definition, memory, sizes."""

import math

import pytest
import torch

from undrop.errors import OptionError
from undrop.lab.models import TransformerXL
from undrop.lab.models.transformer_xl import RelativeAttention, sinusoids

SMALL = {"size": 8, "inner_size": 12, "layers": 2, "heads": 2, "cutoffs": [7, 15]}


def encoding(k, size):
    """R_k by its formula, one entry at a time."""
    frequencies = [10000.0 ** (-2 * i / size) for i in range(size // 2)]
    values = [math.sin(k * w) for w in frequencies] + [math.cos(k * w) for w in frequencies]
    return torch.tensor(values, dtype=torch.double)


def literal_attention(layer, x, memory, u, v):
    """The definition, in a loop over texts, heads, queries and keys."""
    steps, batch, size = x.shape
    past, width = len(memory), size // layer.heads
    w_k, w_v = layer.key_value.weight.chunk(2)
    mixed = torch.zeros_like(x)
    for b in range(batch):
        keys = torch.cat([memory[:, b], x[:, b]])
        for h in range(layer.heads):
            part = slice(h * width, (h + 1) * width)
            for i in range(steps):
                q = (layer.query.weight @ x[i, b])[part]
                scores = []
                for j in range(past + i + 1):
                    content = (q + u[h]) @ (w_k @ keys[j])[part]
                    r = encoding(past + i - j, size)
                    position = (q + v[h]) @ (layer.position.weight @ r)[part]
                    scores.append((content + position) / math.sqrt(width))
                weights = torch.stack(scores).softmax(0)
                for j, weight in enumerate(weights):
                    mixed[i, b, part] += weight * (w_v @ keys[j])[part]
    return mixed @ layer.output.weight.T


@pytest.mark.parametrize(("steps", "past"), [(4, 0), (4, 3), (1, 5), (3, 1)])
def test_relative_attention_matches_its_definition(steps, past):
    torch.manual_seed(0)
    layer = RelativeAttention(6, 2).double()
    x, memory = torch.randn(steps, 2, 6).double(), torch.randn(past, 2, 6).double()
    u, v = torch.randn(2, 3).double(), torch.randn(2, 3).double()
    encodings = sinusoids(steps + past, 6, like=x)
    with torch.no_grad():
        got = layer(x, memory, encodings, u, v)
        expected = literal_attention(layer, x, memory, u, v)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_position_encodings_are_ordered_from_far_to_near():
    got = sinusoids(5, 8, like=torch.zeros(1, dtype=torch.double))
    expected = torch.stack([encoding(k, 8) for k in (4, 3, 2, 1, 0)])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert sinusoids(5, 7, like=torch.zeros(1)).shape == (5, 7)


def test_position_encodings_of_a_half_precision_model_use_single_precision():
    half = sinusoids(2000, 8, like=torch.zeros(1, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, sinusoids(2000, 8, like=torch.zeros(1)).bfloat16())


def test_transformer_xl_has_the_papers_parameter_count():
    with torch.device("meta"):
        model = TransformerXL(267_735)
    # the count that the reference implementation prints for its base model on WikiText-103
    assert sum(p.numel() for p in model.parameters()) == 151_107_538


def test_memory_holds_the_last_steps_of_each_layers_input():
    torch.manual_seed(0)
    model = TransformerXL(30, **SMALL, memory=5).double().eval()
    tokens = torch.randint(30, (9, 2))
    _, state = model(tokens[:3])
    assert [tuple(m.shape) for m in state] == [(3, 2, 8)] * 2
    _, state = model(tokens[3:], state)
    assert [tuple(m.shape) for m in state] == [(5, 2, 8)] * 2
    torch.testing.assert_close(state[0], model.embedding(tokens[-5:]) * 8**0.5)


def test_a_memory_of_length_zero_keeps_nothing():
    torch.manual_seed(0)
    model = TransformerXL(30, **SMALL, memory=0).double().eval()
    tokens = torch.randint(30, (6, 2))
    first, state = model(tokens)
    assert [len(m) for m in state] == [0, 0]
    torch.testing.assert_close(model(tokens, state)[0], first)


def test_memory_can_be_lengthened_for_evaluation():
    torch.manual_seed(0)
    model = TransformerXL(30, **SMALL, memory=1).double().eval()
    tokens = torch.randint(30, (8, 2))
    whole, _ = model(tokens)

    def in_windows():
        _, state = model(tokens[:4])
        return model(tokens[4:], state)[0]

    assert not torch.allclose(in_windows(), whole[4:])
    model.memory = 4
    torch.testing.assert_close(in_windows(), whole[4:])


def test_position_noise_is_shared_by_the_batch():
    torch.manual_seed(0)
    model = TransformerXL(30, **SMALL, dropout=0.5).double()
    model.input_dropout.p = model.output_dropout.p = 0.0
    for layer in model.layers:
        layer.attention.output_dropout.p = 0.0
        layer.feedforward.inner_dropout.p = layer.feedforward.output_dropout.p = 0.0
    tokens = torch.randint(30, (6, 1)).expand(6, 3)
    once, again = model(tokens)[0], model(tokens)[0]
    torch.testing.assert_close(once[:, 0], once[:, 2], rtol=0, atol=1e-13)
    assert (once - again).abs().max() > 1e-8


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"heads": 3}, "heads must divide size=8, got 3"),
        ({"heads": 0}, "heads must be a whole number of at least 1, got 0"),
        ({"memory": -1}, "memory must be a whole number of at least 0, got -1"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1\.0"),
        ({"attention_dropout": 7}, r"attention_dropout must lie in \[0, 1\), got 7"),
        ({"inner_size": 0}, "inner_size must be a whole number of at least 1, got 0"),
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"cutoffs": (), "shrink": 2}, "shrink must be 1 without cutoffs, got 2"),
        ({"cutoffs": [20_000]}, r"cutoffs must be .* from 1 to 29, got \[20000\]"),
    ],
)
def test_invalid_options_of_transformer_xl_raise_errors_that_name_them(option, message):
    with pytest.raises(OptionError, match=message):
        TransformerXL(30, **{**SMALL, **option})
