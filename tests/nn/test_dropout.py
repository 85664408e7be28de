"""The dropout layers that torch lacks: their masks, and the modules that they wrap."""

import pytest
import torch
from torch import nn

from undrop.errors import OptionError
from undrop.nn import AdaptiveEmbedding, EmbeddingDropout, LockedDropout, WeightDrop


@pytest.mark.parametrize("time_dim", [0, 1])
def test_a_locked_mask_is_the_same_at_every_step(time_dim):
    torch.manual_seed(0)
    mask = LockedDropout(0.2, time_dim=time_dim)(torch.ones(6, 5, 40))
    assert set(mask.unique().tolist()) == {0.0, 1.25}
    first = mask.narrow(time_dim, 0, 1)
    assert torch.equal(mask, first.expand_as(mask))
    other = 1 - time_dim
    assert not torch.equal(mask.select(other, 0), mask.select(other, 1))


def test_a_locked_mask_drops_a_fraction_p_of_the_entries():
    torch.manual_seed(0)
    p, entries = 0.3, 200 * 100
    kept = LockedDropout(p)(torch.ones(1, 200, 100)).ne(0).double().mean()
    standard_error = (p * (1 - p) / entries) ** 0.5  # 0.0032
    assert abs(kept - (1 - p)) < 4 * standard_error


@pytest.mark.parametrize(
    "make",
    [
        LockedDropout,
        lambda p: WeightDrop(nn.Linear(2, 2), ["weight"], p),
        lambda p: EmbeddingDropout(nn.Embedding(5, 2), p),
    ],
)
@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_a_drop_probability_out_of_range_is_refused(make, p):
    with pytest.raises(OptionError, match=rf"must lie in \[0, 1\), got {p}"):
        make(p)


def test_weight_drop_drops_only_the_named_weights_and_does_not_change_the_module():
    torch.manual_seed(0)
    linear = nn.Linear(30, 30)
    before = {n: p.clone() for n, p in linear.named_parameters()}
    dropped = WeightDrop(linear, ["weight"], 0.5)
    rows = dropped(torch.eye(30)) - linear.bias
    ratio = (rows.T / linear.weight).detach()
    assert torch.all((ratio.abs() < 1e-5) | ((ratio - 2).abs() < 1e-4))
    assert 0.4 < (ratio.abs() < 1e-5).double().mean() < 0.6  # standard error 0.017
    assert all(torch.equal(p, before[n]) for n, p in linear.named_parameters())
    assert list(dict(dropped.named_parameters())) == ["module.weight", "module.bias"]


def test_weight_drop_draws_a_mask_in_each_call_and_none_in_eval_mode():
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 5)
    dropped, x = WeightDrop(lstm, ["weight_hh_l0"], 0.5), torch.randn(3, 2, 4)
    assert not torch.equal(dropped(x)[0], dropped(x)[0])
    dropped.eval()
    assert torch.equal(dropped(x)[0], lstm(x)[0])


def test_weight_drop_of_an_lstm_passes_the_masked_gradient_to_the_original_weights():
    torch.manual_seed(0)
    lstm, x = nn.LSTM(3, 4).double(), torch.randn(5, 2, 3, dtype=torch.double)
    dropped = WeightDrop(lstm, ["weight_hh_l0"], 0.5)
    state = torch.get_rng_state()
    output, _ = dropped(x)
    (got,) = torch.autograd.grad(output.square().sum(), [lstm.weight_hh_l0])
    torch.set_rng_state(state)
    mask = torch.nn.functional.dropout(torch.ones_like(lstm.weight_hh_l0), 0.5)
    twin = nn.LSTM(3, 4).double()
    twin.load_state_dict(lstm.state_dict() | {"weight_hh_l0": lstm.weight_hh_l0.detach() * mask})
    expected, _ = twin(x)
    torch.testing.assert_close(output, expected)
    (wanted,) = torch.autograd.grad(expected.square().sum(), [twin.weight_hh_l0])
    torch.testing.assert_close(got, wanted * mask)


def test_the_error_of_weight_drop_lists_the_parameters_of_the_module():
    with pytest.raises(OptionError, match=r"Linear has no parameter w: its own .* weight, bias"):
        WeightDrop(nn.Linear(2, 2), ["w"])
    with pytest.raises(OptionError, match="names is empty: choose from weight, bias"):
        WeightDrop(nn.Linear(2, 2), [])


@pytest.mark.parametrize(
    "embedding",
    [nn.Embedding(12, 3), AdaptiveEmbedding(12, 3, cutoffs=[4, 8])],
    ids=["plain", "adaptive"],
)
def test_a_dropped_word_is_dropped_wherever_it_occurs(embedding):
    torch.manual_seed(0)
    dropout = EmbeddingDropout(embedding, 0.5)
    tokens = torch.arange(12).repeat(4, 2)
    ratio = (dropout(tokens) / embedding(tokens)).detach()
    assert torch.all((ratio == 0) | ((ratio - 2).abs() < 1e-5))
    per_word = ratio[:1, :12, :1]
    assert 0 < per_word.count_nonzero() < 12
    torch.testing.assert_close(ratio, per_word.repeat(4, 2, 3))
    dropout.eval()
    assert torch.equal(dropout(tokens), embedding(tokens))
