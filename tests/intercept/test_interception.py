"""Under undrop, every dropout does what torch's does: nothing at ε = 0, and dropout at ε = 1."""

from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from device import new_generator
from engine_helpers import EXPLICIT, IMPLICIT, Fixed, design, evaluate, gradient, seeded
from problems import D, Problem
from undrop.engines import Antithetic, Exact, Reverse, ScaledNoise, Tangent
from undrop.engines.reverse import TWICE_DIFFERENTIABLE
from undrop.engines.tangent_rules import TANGENT_RULES
from undrop.intercept import SITE_RULES, Interception, no_noise
from undrop.intercept.attention import AttentionCall, unfused_attention
from undrop.losses import MSE
from undrop.nn import LockedDropout, WeightDrop


class Calls(nn.Module):
    """Modules by name, and a function of them and the input."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.function(self, x)


def attention(**how):
    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 * self.training, **how)
        return y.transpose(1, 2).flatten(-2)

    return Calls(attend, qkv=nn.Linear(4, 12))


def grouped(self, x):
    """Four heads of queries share two of keys and values."""
    y = self.qkv(x).unflatten(-1, (8, 2)).transpose(1, 2)
    y = F.scaled_dot_product_attention(
        y[:, :4], y[:, 4:6], y[:, 6:], dropout_p=0.3 * self.training, enable_gqa=True
    )
    return y.transpose(1, 2).flatten(-2)


def multi_head(weights, **how):
    def attend(self, x):
        y, w = self.attention(x, x, x, need_weights=weights, **how)
        return torch.cat((y, w), -1) if weights else y

    return Calls(attend, attention=nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True))


def recurrent(cell, **how):
    net = cell(4, 3, num_layers=2, dropout=0.3, batch_first=True, **how)
    return Calls(lambda self, x: self.rnn(x)[0], rnn=net)


def packed(cell, **how):
    def run(self, x):
        lengths = torch.tensor([5, 3, 1]).repeat(len(x) // 3)
        order = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, state = self.rnn(order)
        state = state[0] if isinstance(state, tuple) else state
        return torch.cat((out.data.flatten(), state.flatten()))

    return Calls(run, rnn=cell(4, 3, num_layers=2, dropout=0.3, **how))


def in_place(self, x):
    """The model ignores what the dropouts return: they change their input in place."""
    h = self.first(x)
    F.dropout(h, 0.3, self.training, inplace=True)
    h = self.second(h)
    self.dropout(h)
    return h


SOME = torch.ones(5, 5, dtype=torch.bool).tril(1)
EMPTY = SOME.clone()
EMPTY[0] = False
MODELS = {
    "dropout": lambda: Calls(
        lambda self, x: self.d(self.a(x)), a=nn.Linear(4, 3), d=nn.Dropout(0.3)
    ),
    "in place": lambda: Calls(
        in_place,
        first=nn.Linear(4, 4),
        second=nn.Linear(4, 3),
        dropout=nn.Dropout(0.2, inplace=True),
    ),
    "dropout1d": lambda: nn.Sequential(nn.Conv1d(5, 3, 2), nn.Dropout1d(0.3, inplace=True)),
    "locked": lambda: nn.Sequential(nn.Linear(4, 3), LockedDropout(0.3, time_dim=1)),
    "weights": lambda: nn.Sequential(WeightDrop(nn.Linear(4, 3), ["weight", "bias"], 0.3)),
    "weights of an LSTM": lambda: Calls(
        lambda self, x: self.w(x)[0],
        w=WeightDrop(nn.LSTM(4, 3, batch_first=True), ["weight_hh_l0", "weight_ih_l0"], 0.3),
    ),
    "attention": attention,
    "causal": lambda: attention(is_causal=True),
    "masked": lambda: attention(attn_mask=SOME),
    "masked rows": lambda: attention(attn_mask=EMPTY),
    "additive": lambda: attention(attn_mask=torch.linspace(-1, 1, 25).double().view(5, 5)),
    "scaled": lambda: attention(scale=0.1),
    "grouped": lambda: Calls(grouped, qkv=nn.Linear(4, 16)),
    "heads": lambda: multi_head(False),
    "heads with weights": lambda: multi_head(True),
    "heads, masked": lambda: multi_head(True, attn_mask=~SOME),
    "heads, causal": lambda: multi_head(False, attn_mask=~SOME, is_causal=True),
    "lstm": lambda: recurrent(nn.LSTM),
    "gru": lambda: recurrent(nn.GRU, bias=False),
    "rnn": lambda: recurrent(nn.RNN),
    "relu rnn": lambda: recurrent(nn.RNN, nonlinearity="relu"),
    "both ways": lambda: recurrent(nn.LSTM, bidirectional=True),
    "gru both ways": lambda: recurrent(nn.GRU, bidirectional=True),
    "projected": lambda: recurrent(nn.LSTM, proj_size=2),
    "packed lstm": lambda: packed(nn.LSTM, bidirectional=True),
    "packed gru": lambda: packed(nn.GRU, bidirectional=True),
    "packed, projected": lambda: packed(nn.LSTM, proj_size=2),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.3, batch_first=True),
    "encoder, norm first": lambda: nn.TransformerEncoderLayer(
        4, 2, 5, dropout=0.3, batch_first=True, norm_first=True, activation="gelu"
    ),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().to(D)


X = torch.randn(3, 5, 4, dtype=D, generator=new_generator(0))


@pytest.mark.parametrize("rules", [None, TWICE_DIFFERENTIABLE, TANGENT_RULES])
def test_without_noise_the_output_is_that_of_eval_mode(model, rules):
    with Interception(model, no_noise, rules):
        found = model(X)
    torch.testing.assert_close(found, model.eval()(X))


def regression(model):
    """The model with a squared error."""
    with torch.no_grad():
        target = torch.zeros_like(model.eval()(X))
    return Problem(model.train(), X, target, MSE())


def assert_same(p, one, other, tolerance):
    assert one.total.item() == pytest.approx(other.total.item(), rel=tolerance)
    a, b = (gradient(found.total, p.model) for found in (one, other))
    torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=tolerance)


def test_the_tangent_engine_agrees_with_plain_passes(model):
    p = regression(model)
    row = next(design(p)).row
    row = torch.randn(row.shape, dtype=D, generator=new_generator(1)).sign()
    assert_same(p, *(evaluate(e, p, Fixed(row)) for e in (Tangent(), Antithetic(1e-4))), 1e-6)


def test_the_reverse_engine_agrees_with_the_tangent_and_the_exact_engine(model):
    """For the parts that the reverse engine does not sample: the noise, and the loss Jacobian."""
    p = regression(model)
    assert_same(p, *(evaluate(e, p, seeded(1), IMPLICIT) for e in (Reverse(), Tangent())), 1e-9)
    form = "loss-jacobian"
    assert_same(p, *(evaluate(e, p, seeded(1), EXPLICIT, form) for e in (Reverse(), Exact())), 1e-9)


SHARED = ("weights", "weights of an LSTM")  # all copies would share one draw
VECTORISED = [name for name in MODELS if name not in SHARED and not name.startswith("packed")]


def assert_same_law(ours, theirs):
    """Means and covariances of two sets of draws, each within 5 standard errors."""

    def compare(a, b):
        error = ((a.var(0) + b.var(0)) / len(a)).sqrt()
        assert bool(((a.mean(0) - b.mean(0)).abs() <= 5 * error + 1e-12).all())

    ours, theirs = ours.flatten(1), theirs.flatten(1)
    compare(ours, theirs)
    centered = ((x - x.mean(0))[:, :15] for x in (ours, theirs))
    compare(*(x.unsqueeze(1) * x.unsqueeze(2) for x in centered))


@pytest.mark.parametrize("name", VECTORISED)
def test_dropouts_own_noise_has_the_distribution_of_torchs_dropout(name):
    """Compare 5,000 copies of one example with each kind of dropout."""
    torch.manual_seed(0)
    model = MODELS[name]().to(D)
    x = X[:1].expand(5000, 5, 4)
    with torch.no_grad():
        theirs = model(x.clone())
        with Interception(model, ScaledNoise(seeded(1, noise="dropout"), 1.0)):
            ours = model(x.clone())
    assert theirs.std(0).max() > 0
    assert_same_law(ours, theirs)


def test_noise_on_weights_has_the_distribution_of_torchs_dropout():
    torch.manual_seed(0)
    model = MODELS["weights"]().to(D)
    rows = []
    with torch.no_grad():
        for seed in range(1500):
            theirs = model(X)
            with Interception(model, ScaledNoise(seeded(seed, noise="dropout"), 1.0)):
                rows.append(torch.stack((theirs, model(X))))
    theirs, ours = torch.stack(rows).unbind(1)
    assert_same_law(ours, theirs)


@pytest.mark.parametrize("shape", [(5, 5), (2, 1, 5, 5)])
def test_unfused_attention_handles_masks_like_torchs_attention(shape):
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=D)
    mask = torch.rand(shape) > 0.5
    mask[..., 0, :] = False  # no key is allowed: torch returns zeros
    call = AttentionCall(q, k, v, attn_mask=mask)
    mode = Interception(nn.Identity(), no_noise)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(unfused_attention(mode, call), expected)


def test_a_causal_mask_of_another_length_starts_in_the_upper_left():
    q, k = torch.randn(2, 3, 4, dtype=D), torch.randn(2, 6, 4, dtype=D)
    mode = Interception(nn.Identity(), no_noise)
    expected = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    found = unfused_attention(mode, AttentionCall(q, k, k, is_causal=True))
    torch.testing.assert_close(found, expected)


def test_other_threads_never_see_an_interception():
    dropped = []
    with Interception(nn.Identity(), no_noise):
        thread = Thread(target=lambda: dropped.append(F.dropout(torch.ones(1000), 0.5)))
        thread.start()
        thread.join()
        assert F.dropout(torch.ones(1000), 0.5).min() == 1
    assert dropped[0].min() == 0


def test_interceptions_end_with_their_block_and_may_nest():
    h = torch.ones(1000)
    with Interception(nn.Identity(), lambda site, h: 2 * h):
        with Interception(nn.Identity(), no_noise):
            assert torch.equal(F.dropout(h, 0.5), h)
        assert torch.equal(F.dropout(h, 0.5), 2 * h)
    assert F.dropout(h, 0.5).min() == 0


def test_a_function_has_one_site_rule():
    with pytest.raises(ValueError, match="already registered as a site rule"):
        SITE_RULES.register(F.dropout)(lambda mode, *args, **kwargs: None)


@pytest.mark.parametrize("drop", [nn.Dropout(0.3), nn.Dropout1d(0.3), LockedDropout(0.3)])
def test_without_noise_a_dropout_returns_a_new_tensor(drop):
    """The model may change it in place, and use the input again."""
    x = torch.zeros(3, 2, 4)
    with Interception(drop, no_noise):
        drop(x).add_(1.0)
    assert not x.any()
