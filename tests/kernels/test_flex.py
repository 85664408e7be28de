"""FlexAttention with dropout, against eager attention with dropout."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

import undrop
from device import DEVICE
from engine_helpers import BOTH, evaluate, gradient, random_signs, relative
from problems import D, Problem
from undrop.engines import Antithetic, Exact, Reverse, Tangent
from undrop.errors import OptionError
from undrop.kernels.flex import FlexCall, attend_with_kernel, attend_without_kernel
from undrop.losses import CrossEntropy
from undrop.nn import flex_attention

pytestmark = pytest.mark.skipif(
    DEVICE.type not in ("cpu", "cuda", "mps", "hpu"),
    reason="torch has FlexAttention only for CUDA, CPU, HPU and MPS",
)

B, H, Q, W = 3, 2, 4, 4
BIAS = torch.linspace(-1.0, 1.0, H * Q * Q, dtype=D).view(H, Q, Q)


def biased(score, b, h, q, k):
    return score + BIAS[h, q, k]


def causal(b, h, q, k):
    return q >= k


def strictly_causal(b, h, q, k):
    """Exclude every key for the first query."""
    return q > k


def reference(call: FlexCall, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Eager attention with factors on its probabilities, and its log-sum-exp."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (call.key, call.value))
    scores = call.query @ key.transpose(-2, -1) * (call.scale or 1 / math.sqrt(W))
    if call.score_mod is not None:
        scores = scores + BIAS
    if call.block_mask is not None:
        q, k = torch.arange(Q)[:, None], torch.arange(Q)[None]
        scores = scores.masked_fill(~call.block_mask.mask_mod(None, None, q, k), -math.inf)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    return (p * factors) @ value, scores.logsumexp(-1)


CASES = {
    "plain": {},
    "score_mod": {"score_mod": biased},
    "causal": {"mask": causal},
    "empty row": {"mask": strictly_causal, "score_mod": biased},
    "scaled": {"scale": 0.3},
    "grouped": {"heads": 1, "enable_gqa": True},
}
FACTORS = {
    "signs": lambda shape: 1 + 0.3 * torch.randn(shape, dtype=D).sign(),
    "dropout": lambda shape: F.dropout(torch.ones(shape, dtype=D), 0.6),
}


def make_call(mask=None, heads=H, **options) -> FlexCall:
    if mask is not None:
        options["block_mask"] = create_block_mask(mask, None, None, Q, Q, device=DEVICE)
    sizes = ((B, H, Q, W), (B, heads, Q, W), (B, heads, Q, W))
    tensors = (torch.randn(size, dtype=D, requires_grad=True) for size in sizes)
    return FlexCall(*tensors, **options, dropout_p=0.1)


@pytest.fixture
def kernel_gradients(monkeypatch):
    """Torch's eager kernel has a gradient on the CPU, but a check of the device refuses it."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)


@pytest.mark.parametrize("path", [attend_without_kernel, attend_with_kernel])
@pytest.mark.parametrize("noise", FACTORS)
@pytest.mark.parametrize("case", CASES)
def test_flex_attention_has_the_value_and_gradient_of_eager_attention(
    case, noise, path, kernel_gradients
):
    call = make_call(**CASES[case])
    factors = FACTORS[noise](call.shape)
    factors[0, 0, 1] = 0.0 if noise == "dropout" else factors[0, 0, 1]  # a row that is all dropped
    expected, _ = reference(call, factors)
    found = path(call, factors)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((found * weights).sum(), call[:3])
    theirs = torch.autograd.grad((expected * weights).sum(), call[:3])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_log_sum_exp_of_flex_attention_has_no_noise(kernel_gradients):
    call = make_call(mask=causal)
    factors = FACTORS["signs"](call.shape)
    _, lse = reference(call, factors)
    for path in (attend_without_kernel, attend_with_kernel):
        torch.testing.assert_close(path(call._replace(return_lse=True), factors)[1], lse)
        if not hasattr(torch_flex, "AuxRequest"):  # older than torch 2.9
            continue
        _, aux = path(call._replace(return_aux=torch_flex.AuxRequest(lse=True)), factors)
        torch.testing.assert_close(aux.lse, lse)
        assert aux.max_scores is None


def test_the_kernel_returns_nan_for_a_negative_factor():
    call = make_call()
    factors = FACTORS["signs"](call.shape)
    factors[0, 0, 0, 0] = -0.5
    with torch.no_grad():
        call = call._replace(**{n: getattr(call, n).detach() for n in ("query", "key", "value")})
        assert attend_with_kernel(call, factors).isnan().any()
        torch.testing.assert_close(
            attend_without_kernel(call, factors), reference(call, factors)[0]
        )


def test_without_dropout_flex_attention_equals_torchs():
    call = make_call(mask=causal, score_mod=biased)
    q, k, v = (x.detach() for x in call[:3])
    plain = torch_flex.flex_attention(q, k, v, biased, call.block_mask)
    assert torch.equal(flex_attention(q, k, v, biased, call.block_mask), plain)
    torch.testing.assert_close(flex_attention(*call[:3], biased, call.block_mask), plain)


def test_flex_attention_drops_like_eager_attention():
    call = make_call(mask=causal)
    torch.manual_seed(1)
    found = flex_attention(*call[:3], block_mask=call.block_mask, dropout_p=0.4)
    torch.manual_seed(1)
    factors = F.dropout(torch.ones(call.shape, dtype=D), 0.4)
    torch.testing.assert_close(found, reference(call, factors)[0])
    with pytest.raises(OptionError, match=r"dropout_p must lie in \[0, 1\], got 1.5"):
        flex_attention(*call[:3], dropout_p=1.5)


MASK = create_block_mask(causal, None, None, Q, Q, device=DEVICE)


class Attention(nn.Module):
    """Causal attention with a bias, then a classifier of every position."""

    def __init__(self, flex: bool) -> None:
        super().__init__()
        self.flex = flex
        self.qkv, self.out = nn.Linear(5, 3 * H * W), nn.Linear(H * W, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.reshape(len(x), Q, H, W).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        h = self.attend(q, k, v, 0.3 if self.training else 0.0)
        return self.out(self.drop(h.transpose(1, 2).flatten(2).tanh()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        if self.flex:
            return flex_attention(q, k, v, biased, MASK, dropout_p=p)
        scores = q @ k.transpose(-2, -1) / math.sqrt(W) + BIAS.to(q)
        allowed = torch.ones(Q, Q, dtype=torch.bool).tril()
        probabilities = torch.softmax(scores.masked_fill(~allowed, -math.inf), -1)
        return F.dropout(probabilities, p, self.training) @ v


def twins() -> tuple[Problem, Problem]:
    flex, eager = Attention(True).to(D), Attention(False).to(D)
    eager.load_state_dict(flex.state_dict())
    x, y = torch.randn(B, Q, 5, dtype=D), torch.randint(3, (B, Q))
    return Problem(flex, x, y, CrossEntropy()), Problem(eager, x, y, CrossEntropy())


def test_flex_attention_is_listed_as_a_site():
    first, second = undrop.sites(Attention(True), torch.randn(B, Q, 5))
    assert (first.name, first.kind, first.p, first.mask) == (
        "attention",
        "attention",
        0.3,
        "per probability",
    )
    assert first.shape == first.mask_shape == (B, H, Q, Q)
    assert not first.active_in_eval
    assert second.name == "drop"


def evaluated(engine, problem):
    draw = random_signs(problem, 3)
    labels = torch.Generator().manual_seed(7)  # the reverse engine draws some
    draw.generator = lambda device: labels
    return evaluate(engine, problem, draw)


@pytest.mark.parametrize("engine", [Antithetic, Tangent, Reverse, Exact])
def test_every_engine_agrees_on_flex_and_eager_attention(engine):
    flex, eager = twins()
    found, expected = evaluated(engine(), flex), evaluated(engine(), eager)
    assert found.engine == expected.engine
    torch.testing.assert_close(found.total, expected.total, rtol=1e-9, atol=1e-12)
    for name, value in expected.parts.items():
        torch.testing.assert_close(found.parts[name], value, rtol=1e-8, atol=1e-12)
    ours, theirs = gradient(found.total, flex.model), gradient(expected.total, eager.model)
    assert relative(ours, theirs) < 1e-8


@pytest.mark.parametrize("fraction", [1.0, 0.34])
def test_flex_attention_runs_in_one_stacked_pass(fraction):
    flex, _ = twins()
    evaluation = evaluate(Antithetic(), flex, random_signs(flex, 3), BOTH, fraction=fraction)
    assert evaluation.engine == "antithetic: one stacked pass"


def test_the_fused_kernel_gives_the_same_stacked_pass(kernel_gradients, monkeypatch):
    """The code path of a GPU, with torch's eager kernel."""
    flex, _ = twins()
    expected = evaluate(Antithetic(), flex, random_signs(flex, 3))
    theirs = gradient(expected.total, flex.model)
    monkeypatch.setattr("undrop.intercept.attention.attend", attend_with_kernel)
    found = evaluate(Antithetic(), flex, random_signs(flex, 3))
    torch.testing.assert_close(found.total, expected.total, rtol=1e-9, atol=1e-12)
    assert relative(gradient(found.total, flex.model), theirs) < 1e-8


def test_flex_attention_has_the_gradient_of_eager_attention_under_dropout():
    flex, eager = twins()
    steps = []
    for p in (flex, eager):
        torch.manual_seed(5)
        steps.append(undrop.Dropout(k=2, loss=p.loss)(p.model, p.inputs, p.targets))
        steps[-1].backward()
    assert steps[0].parts == pytest.approx(steps[1].parts, rel=1e-12)
    for ours, theirs in zip(flex.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Documents(nn.Module):
    """Attention within documents, by a mask that depends on the example."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.inside = nn.Linear(2, 3), nn.Linear(1, 3), inside

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        documents = documents if self.inside else DOCUMENTS

        def same(score, b, h, q, k):
            return torch.where(documents[b, q] == documents[b, k], score, -math.inf)

        return self.out(flex_attention(q, k, v, same, dropout_p=0.3).squeeze(1))


DOCUMENTS = torch.tensor([[0, 0, 1], [0, 1, 1]])


@pytest.mark.parametrize("inside", [True, False])
def test_flex_attention_with_a_mask_per_example_is_stacked_if_the_mask_is_an_input(inside):
    """A tensor from outside the model has no rows for the stacked batch, so undrop runs two passes."""
    model, x, y = Documents(inside).to(D), torch.randn(2, 3, 2, dtype=D), torch.randint(3, (2, 3))
    problem = Problem(model, (x, DOCUMENTS), y, CrossEntropy())
    found = evaluate(Antithetic(1e-3), problem, random_signs(problem, 2))
    assert found.engine.startswith(f"antithetic: {'one stacked pass' if inside else 'two passes'}")
    expected = evaluate(Tangent(), problem, random_signs(problem, 2))
    torch.testing.assert_close(found.total, expected.total, rtol=1e-5, atol=0)


def test_flex_attention_compiles_as_one_graph(backend, caplog):
    """Torch 2.8 breaks the graph at a function mode around FlexAttention: it runs uncompiled there."""
    model, found = Attention(True), []
    x, y = torch.randn(B, Q, 5), torch.randint(3, (B, Q))
    for run in (model, torch.compile(model, backend=backend)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        objective = undrop.Analytic(generator=torch.Generator().manual_seed(1))
        objective(run, x, y).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
    else:
        assert "undrop runs Attention without torch.compile" in caplog.text
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
