"""AWD-LSTM and QRNN: sizes, ties, masks and the QRNN's recurrence."""

import pytest
import torch
from torch import nn

from undrop.errors import OptionError
from undrop.lab.models import AWDLSTM, QRNN
from undrop.lab.models.recurrent import QRNNLayer, linear_scan

SMALL = {"embedding_size": 6, "hidden_size": 10, "layers": 3}


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_recurrent_models_have_the_papers_parameter_counts():
    with torch.device("meta"):
        # the counts that the reference implementation of AWD-LSTM prints
        assert parameters(AWDLSTM(10_000)) == 24_221_600
        assert parameters(AWDLSTM(33_278)) == 33_556_078
        # 267,735 words: rows and biases; four layers of 3 gates; three rows and biases of tails
        words, tails = 267_735 * 401, 3 * 401
        layers = 801 * 7500 + 2 * 2501 * 7500 + 2501 * 1200
        wt103 = QRNN(267_735, cutoffs=[2_800, 20_000, 76_000])
        assert parameters(wt103) == words + tails + layers


@pytest.mark.parametrize("kind", [AWDLSTM, QRNN])
def test_a_tied_model_uses_the_embedding_matrix_for_its_logits(kind):
    model = kind(30, **SMALL)
    rows = [n for n, p in model.named_parameters() if p.shape == (30, 6)]
    assert rows == ["embedding.embedding.weight"]
    assert model.layers[-1](torch.zeros(2, 1, 10), None)[0].shape[-1] == 6
    features = torch.eye(6)[None]
    with torch.no_grad():
        model.shared_embedding().weight.mul_(2)
        logits = model.head(features, model.shared_embedding())
    torch.testing.assert_close(logits[0].T, model.shared_embedding().weight.detach())


@pytest.mark.parametrize("kind", [AWDLSTM, QRNN])
def test_an_untied_model_has_two_word_matrices_and_equal_layers(kind):
    model = kind(30, embedding_size=7, hidden_size=7, layers=2, tied=False)
    rows = [n for n, p in model.named_parameters() if p.shape == (30, 7)]
    assert rows == ["head.weight", "embedding.embedding.weight"]
    x = torch.zeros(2, 1, 7)
    assert all(layer(x, None)[0].shape == x.shape for layer in model.layers)


def test_each_awd_layer_matches_torchs_lstm():
    model = AWDLSTM(30, **SMALL).double().eval()
    x = torch.randn(5, 2, 6, dtype=torch.double)
    for layer in model.layers:
        assert isinstance(layer.module, nn.LSTM)
        expected, (h, c) = layer.module(x)
        x, state = layer(x, None)
        torch.testing.assert_close((x, *state), (expected, h, c))


@pytest.mark.parametrize("kind", [AWDLSTM, QRNN])
def test_locked_masks_are_constant_within_a_window(kind):
    """If the input of a locked dropout is all ones, its output has the same mask at all steps."""
    model = kind(30, **SMALL, input_dropout=0.5, hidden_dropout=0.5, output_dropout=0.5)
    locked = [model.input_dropout, *model.hidden_dropouts, model.output_dropout]
    assert len(locked) == 4
    torch.manual_seed(0)
    for dropout in locked:
        mask = dropout(torch.ones(4, 5, 40))
        assert torch.equal(mask, mask[:1].expand_as(mask))
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        assert not torch.equal(mask[0, 0], mask[0, 1])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
        ({"embedding_size": 2.5}, r"embedding_size must be a whole number of at least 1, got 2\.5"),
        ({"layers": True}, "layers must be a whole number of at least 1, got True"),
        ({"embedding_dropout": -0.1}, r"embedding_dropout must lie in \[0, 1\), got -0\.1"),
        ({"input_dropout": 1.0}, r"input_dropout must lie in \[0, 1\), got 1\.0"),
        ({"hidden_dropout": float("nan")}, r"hidden_dropout must lie in \[0, 1\), got nan"),
        ({"output_dropout": 2}, r"output_dropout must lie in \[0, 1\), got 2"),
        ({"weight_dropout": 1.5}, r"weight_dropout must lie in \[0, 1\), got 1\.5"),
        ({"cutoffs": [20, 10]}, r"cutoffs must be .* from 1 to 29, got \[20, 10\]"),
        ({"cutoffs": [30]}, r"cutoffs must be .* from 1 to 29, got \[30\]"),
        ({"cutoffs": [10], "tied": False}, r"tied must be True .*\(cutoffs=\[10\]\)"),
    ],
)
@pytest.mark.parametrize("kind", [AWDLSTM, QRNN])
def test_invalid_options_of_recurrent_models_raise_errors_that_name_them(kind, option, message):
    with pytest.raises(OptionError, match=message):
        kind(30, **{**SMALL, **option})


def test_an_invalid_vocabulary_or_window_raises_an_error_that_names_it():
    with pytest.raises(OptionError, match="vocab_size must be a whole number of at least 1, got 0"):
        AWDLSTM(0)
    with pytest.raises(OptionError, match="window must be 1 or 2, got 3"):
        QRNN(30, window=3)


def plain_loop(a, b, initial):
    c, outputs = initial[0], []
    for factor, term in zip(a, b, strict=True):
        c = factor * c + term
        outputs.append(c)
    return torch.stack(outputs)


def scan_inputs(steps, *size):
    generator = torch.Generator().manual_seed(steps)
    make = {"dtype": torch.double, "generator": generator}
    a = torch.rand(steps, *size, **make)
    b, initial = torch.randn(steps, *size, **make), torch.randn(1, *size, **make)
    return tuple(x.requires_grad_() for x in (a, b, initial))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7, 8, 13, 64, 141])
def test_the_linear_scan_matches_a_loop_and_its_gradients(steps):
    inputs = scan_inputs(steps, 3, 4)
    weights = torch.randn(steps, 3, 4, dtype=torch.double)
    results = []
    for scan in (linear_scan, plain_loop):
        c = scan(*inputs)
        gradients = torch.autograd.grad((weights * c.square()).sum(), inputs)
        results.append((c, *gradients))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_the_linear_scan_is_accurate_for_gates_near_0_and_1():
    a, b, initial = scan_inputs(100, 5)
    with torch.no_grad():
        a[::3], a[1::7] = 0.0, 1.0
        a[50:60] = 1e-300
    torch.testing.assert_close(
        linear_scan(a, b, initial), plain_loop(a, b, initial), rtol=1e-12, atol=1e-12
    )


def test_the_linear_scan_differentiates_in_every_mode():
    inputs = scan_inputs(5, 2)
    assert torch.autograd.gradcheck(linear_scan, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(linear_scan, inputs, check_fwd_over_rev=True)


def test_backward_through_the_linear_scans_tangent_is_correct():
    """∂/∂a of a forward-mode derivative equals its finite differences."""
    a, b, initial = (x.detach() for x in scan_inputs(6, 3))
    direction = torch.randn(6, 3, dtype=torch.double, generator=torch.Generator().manual_seed(2))

    def tangent(a):
        _, t = torch.func.jvp(lambda a: linear_scan(a, b, initial), (a,), (direction,))
        return t.sin().sum()

    gradient = torch.func.grad(tangent)(a)
    probe, step = torch.randn_like(a), 1e-6
    expected = (tangent(a + step * probe) - tangent(a - step * probe)) / (2 * step)
    torch.testing.assert_close((gradient * probe).sum(), expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("window", [1, 2])
def test_a_qrnn_layer_matches_its_equations(window):
    torch.manual_seed(0)
    layer = QRNNLayer(3, 4, window=window).double()
    linear = layer.linear.module
    x = torch.randn(6, 2, 3, dtype=torch.double)
    c, before = torch.zeros(2, 4, dtype=torch.double), torch.zeros(2, 3, dtype=torch.double)
    expected = []
    for now in x:
        seen = now if window == 1 else torch.cat([now, before], -1)
        z, f, o = (seen @ linear.weight.T + linear.bias).chunk(3, -1)
        c = f.sigmoid() * c + (1 - f.sigmoid()) * z.tanh()
        expected.append(o.sigmoid() * c)
        before = now
    h, state = layer(x)
    torch.testing.assert_close(h, torch.stack(expected), rtol=1e-12, atol=1e-12)
    assert len(state) == window
    torch.testing.assert_close(state[0][0], c, rtol=1e-12, atol=1e-12)


def test_only_the_first_qrnn_layer_sees_two_inputs():
    model = QRNN(30, **SMALL, window=2)
    assert [layer.window for layer in model.layers] == [2, 1, 1]


def test_a_qrnn_has_no_loop_over_tokens():
    """Twice as many tokens need only a few more calls of torch functions."""

    class Counter(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    layer, counts = QRNNLayer(3, 4), []
    for steps in (128, 256):
        with Counter() as counter:
            layer(torch.zeros(steps, 2, 3))
        counts.append(counter.calls)
    assert counts[1] - counts[0] < 30
