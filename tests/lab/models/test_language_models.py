"""What every language model must do, tested on small ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import undrop
from undrop.engines.proven import first_unproven_op
from undrop.errors import OptionError
from undrop.lab.models import AWDLSTM, GPT, QRNN, TransformerXL, detach

VOCABULARY, STEPS, BATCH = 30, 9, 3
RECURRENT = {"embedding_size": 6, "hidden_size": 10, "layers": 2}
TRANSFORMER = {"size": 8, "layers": 2, "heads": 2}

MODELS = {
    "awd-lstm": lambda: AWDLSTM(VOCABULARY, **RECURRENT, embedding_dropout=0.2),
    "awd-lstm untied": lambda: AWDLSTM(VOCABULARY, **RECURRENT, tied=False),
    "awd-lstm adaptive": lambda: AWDLSTM(VOCABULARY, **RECURRENT, cutoffs=[7, 15]),
    "qrnn": lambda: QRNN(VOCABULARY, **RECURRENT),
    "qrnn window 1": lambda: QRNN(VOCABULARY, **RECURRENT, window=1, weight_dropout=0.3),
    "qrnn adaptive": lambda: QRNN(VOCABULARY, **RECURRENT, cutoffs=[7, 15], embedding_dropout=0.2),
    "transformer-xl": lambda: TransformerXL(
        VOCABULARY, **TRANSFORMER, inner_size=12, memory=20, cutoffs=[7, 15]
    ),
    "transformer-xl shrinking": lambda: TransformerXL(
        VOCABULARY, **TRANSFORMER, inner_size=12, memory=20, cutoffs=[7, 15], shrink=2
    ),
    "transformer-xl plain": lambda: TransformerXL(
        VOCABULARY, **TRANSFORMER, inner_size=12, memory=20, cutoffs=(), attention_dropout=0.2
    ),
    "gpt": lambda: GPT(VOCABULARY, **TRANSFORMER, context=20),
}
STATEFUL = [name for name in MODELS if name != "gpt"]


def build(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


@pytest.fixture(params=MODELS)
def model(request):
    return build(request.param)


@pytest.fixture(params=STATEFUL)
def stateful(request):
    return build(request.param)


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (STEPS, BATCH), generator=generator)


def test_outputs_and_states_have_the_documented_shapes(model, tokens):
    logits, state = model(tokens)
    features, _ = model(tokens, state, logits=False)
    assert logits.shape == (STEPS, BATCH, VOCABULARY)
    assert features.shape[:2] == (STEPS, BATCH)
    assert all(tensor.shape[1] == BATCH for tensor in tree_leaves(state))


def test_logits_equal_the_head_applied_to_the_features(model, tokens):
    model.eval()
    features, _ = model(tokens, logits=False)
    torch.testing.assert_close(model.head(features, model.shared_embedding()), model(tokens)[0])


def test_eval_is_deterministic_and_training_is_not(model, tokens):
    torch.manual_seed(3)
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


def test_no_token_sees_later_tokens(model, tokens):
    model.eval()
    changed = tokens.clone()
    changed[5:] = (changed[5:] + 1) % VOCABULARY
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:5], after[:5], rtol=0, atol=1e-14)
    assert (before[5:] - after[5:]).abs().amax(-1).min() > 1e-6


def test_texts_of_a_batch_are_independent(model, tokens):
    model.eval()
    alone, _ = model(tokens[:, :1])
    torch.testing.assert_close(model(tokens)[0][:, :1], alone, rtol=1e-10, atol=1e-12)


def test_windows_with_carried_state_equal_one_long_window(stateful, tokens):
    model = stateful.eval()
    whole, end = model(tokens)
    state, outputs = None, []
    for window in tokens.split([4, 1, 4]):
        output, state = model(window, state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=1e-10, atol=1e-12)
    for one, other in zip(tree_leaves(state), tree_leaves(end), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_detach_cuts_the_history_and_keeps_the_values(stateful, tokens):
    _, state = stateful(tokens)
    cut = detach(state)
    assert len(cut) == len(state)
    for one, other in zip(tree_leaves(cut), tree_leaves(state), strict=True):
        assert other.requires_grad
        assert not one.requires_grad
        assert torch.equal(one, other)


def test_every_parameter_gets_a_gradient(model, tokens):
    torch.manual_seed(3)
    _, state = model(tokens)
    logits, _ = model(tokens, detach(state))
    F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 0).flatten()).backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []


def test_every_parameter_has_one_name(model):
    names = set(dict(model.named_parameters()))
    assert set(model.state_dict()) == names


def test_a_deep_copy_equals_the_model_and_shares_no_memory(model, tokens):
    model.eval()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens)[0], model(tokens)[0])
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(twin(tokens)[0], model(tokens)[0])
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(twin.state_dict())
    assert torch.equal(twin(tokens)[0], fresh(tokens)[0])


def test_the_feature_loss_equals_the_cross_entropy_of_the_logits(model, tokens):
    target = tokens.roll(-1, 0)
    model.eval()
    loss = model.loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the same loss object, after the parameters moved
        logits, _ = model(tokens)
        expected = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        wanted = torch.autograd.grad(expected, list(model.parameters()))
        optimizer.zero_grad()
        got = loss.value(model(tokens, logits=False)[0], target)
        got.backward()
        torch.testing.assert_close(got, expected)
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        optimizer.step()


def test_every_op_of_a_language_model_is_proven_for_the_tangent_engine(model, tokens):
    for logits in (True, False):
        assert first_unproven_op(copy.deepcopy(model), {"tokens": tokens, "logits": logits}) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "awd-lstm",
            """embedding input_dropout layers.0.weight_hh_l0 hidden_dropouts.0
            layers.1.weight_hh_l0 output_dropout""",
        ),
        (
            "qrnn window 1",
            """input_dropout layers.0.linear.weight hidden_dropouts.0 layers.1.linear.weight
            output_dropout""",
        ),
        (
            "transformer-xl plain",
            """input_dropout position_dropout
            layers.0.attention.attention_dropout layers.0.attention.output_dropout
            layers.0.feedforward.inner_dropout layers.0.feedforward.output_dropout
            layers.1.attention.attention_dropout layers.1.attention.output_dropout
            layers.1.feedforward.inner_dropout layers.1.feedforward.output_dropout
            output_dropout""",
        ),
        (
            "gpt",
            """input_dropout layers.0.attention.attention layers.0.attention.output_dropout
            layers.0.feedforward.output_dropout layers.1.attention.attention
            layers.1.attention.output_dropout layers.1.feedforward.output_dropout""",
        ),
    ],
)
def test_dropout_sites_have_readable_names(name, expected, tokens):
    found = undrop.sites(build(name), tokens)
    assert [site.name for site in found] == expected.split()


@pytest.mark.portable
def test_models_run_in_half_precision(model, tokens):
    logits, _ = model.bfloat16()(tokens)
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"tokens must be a non-empty tensor \(time, batch\)"),
        (torch.zeros(0, 2, dtype=torch.long), r"got torch.int64 of shape \(0, 2\)"),
        (torch.zeros(3, 2), "of whole numbers, got torch.float32"),
    ],
)
def test_invalid_tokens_raise_an_error_that_describes_them(model, bad, message):
    with pytest.raises(OptionError, match=message):
        model(bad)


def test_a_state_of_another_batch_size_is_refused(stateful, tokens):
    _, state = stateful(tokens)
    with pytest.raises(OptionError, match=r"the batch size of tokens, 2, got 3: pass state=None"):
        stateful(tokens[:, :2], state)
