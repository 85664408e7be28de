"""Reading off a Transformers model what it is trained for, and its noise sites."""

import pytest
import torch
import transformers as hf

import undrop
from engine_helpers import EXPLICIT, design, evaluate
from integrations.families import BERT, FAMILIES, SPECIAL, V, text, words
from problems import Problem
from undrop.engines import Antithetic, Exact, Tangent
from undrop.errors import EngineError, OptionError, TargetError
from undrop.integrations.heads import (
    check_attention,
    decoder_inputs,
    read_head,
    same_as_the_models_own,
)
from undrop.losses import MSE, BCEWithLogits, CrossEntropy

D = torch.float64
NAMES = list(FAMILIES)
ATTENTION = ["eager", "sdpa"]


def problem(name: str, attention: str, n: int = 1) -> Problem:
    family = FAMILIES[name]
    model, inputs = family.model(attention, D), family.data(n, D)
    labels = inputs.pop("labels")
    task = read_head(model, labels)
    return Problem(model, decoder_inputs(model, inputs, labels), task.targets(labels), task.loss)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", NAMES)
def test_every_site_is_found(name, attention):
    made = problem(name, attention)
    found = undrop.sites(made.model, made.inputs)
    assert list(found.names) == FAMILIES[name].names(attention)
    assert not any(site.active_in_eval for site in found)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", NAMES)
def test_explicit_part_is_the_exact_one(name, attention):
    """Over a design of signs the mean of the tangent engine's is the expectation itself.

    It agrees to what Transformers leaves of float64: some norms are taken in float32.
    """
    made = problem(name, attention)
    exact = evaluate(Exact(), made, next(iter(design(made))), EXPLICIT).parts["explicit"]
    values = [evaluate(Tangent(), made, draw, EXPLICIT).total.detach() for draw in design(made)]
    assert exact > 0
    torch.testing.assert_close(torch.stack(values).mean(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_explicit_part_of_the_antithetic_engine(name):
    made = problem(name, "sdpa")
    draw = next(iter(design(made)))
    tangent = evaluate(Tangent(), made, draw, EXPLICIT).total
    antithetic = evaluate(Antithetic(1e-2), made, draw, EXPLICIT).total
    torch.testing.assert_close(antithetic, tangent, rtol=2e-3, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_the_models_own(name):
    family = FAMILIES[name]
    model, inputs = family.model(), family.data(3)
    labels = inputs.pop("labels")
    assert same_as_the_models_own(model, inputs, labels, read_head(model, labels))


def classifier(**config) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**{**BERT, **config})).train()


@pytest.mark.parametrize(
    ("config", "labels", "loss"),
    [
        ({"num_labels": 3}, torch.tensor([[2], [0]]), CrossEntropy),
        ({"num_labels": 1}, torch.tensor([0.3, -1.0]), MSE),
        ({"num_labels": 1}, torch.tensor([3, 5]), MSE),
        ({"num_labels": 3, "problem_type": "regression"}, torch.randn(2, 3), MSE),
        ({"num_labels": 3}, torch.tensor([[0.0, 1, 1], [1, 0, 0]]), BCEWithLogits),
        (
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            torch.tensor([[0.0, 1, 1], [1, 0, 0]]),
            BCEWithLogits,
        ),
    ],
)
def test_kinds_of_classifier(config, labels, loss):
    model, batch = classifier(**config), text(2)
    if loss is MSE:
        model.config.problem_type = "regression"  # or Transformers takes whole numbers for classes
    task = read_head(model, labels)
    assert type(task.loss) is loss
    given = labels.float() if loss is MSE else labels
    assert same_as_the_models_own(model, batch, given, task)


def test_without_problem_type_one_number_is_regression():
    assert isinstance(read_head(classifier(num_labels=1), torch.tensor([0.5])).loss, MSE)


def test_label_smoothing():
    task = read_head(classifier(), torch.tensor([1]), 0.1)
    assert task.loss.label_smoothing == 0.1
    with pytest.raises(OptionError, match=r"label_smoothing_factor is for class labels.*MSE"):
        read_head(classifier(num_labels=1), torch.tensor([0.5]), 0.1)


def test_unknown_heads_are_refused():
    model = hf.BertForQuestionAnswering(hf.BertConfig(**BERT))
    with pytest.raises(OptionError, match=r"ForQuestionAnsweringLoss.*override `undrop_task`"):
        read_head(model, torch.tensor([1]))


def test_a_loss_with_a_part_of_its_own_is_refused():
    """A mixture of experts adds a loss on its router, about which the logits say nothing."""
    config = hf.MixtralConfig(
        vocab_size=V,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        attention_dropout=0.1,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        **SPECIAL,
    )
    model = hf.MixtralForCausalLM(config).train()
    ids = words(2)
    with pytest.raises(OptionError, match=r"reports a loss of .* it adds something of its own"):
        same_as_the_models_own(model, {"input_ids": ids}, ids, read_head(model, ids))


def test_a_batch_without_labels_decides_nothing():
    family = FAMILIES["gpt2"]
    model, inputs = family.model(), family.data(2)
    labels = torch.full_like(inputs.pop("labels"), -100)
    assert not same_as_the_models_own(model, inputs, labels, read_head(model, labels))


def test_attention_that_hides_its_dropout_is_refused():
    model = FAMILIES["llama"].model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(EngineError, match=r"attention_dropout = 0.2.*'flash_attention_2'.*'sdpa'"):
        check_attention(model)
    model.config.attention_dropout = 0.0
    check_attention(model)


def test_what_the_decoder_reads():
    family = FAMILIES["t5"]
    model, inputs = family.model(), family.data(2)
    labels = inputs.pop("labels")
    read = decoder_inputs(model, inputs, labels)["decoder_input_ids"]
    assert read[:, 0].tolist() == [0, 0]
    assert torch.equal(read[:, 1:], labels[:, :-1])
    given = {**inputs, "decoder_input_ids": labels}
    assert decoder_inputs(model, given, labels) is given
    model.prepare_decoder_input_ids_from_labels = None
    with pytest.raises(TargetError, match="put decoder_input_ids into the batch"):
        decoder_inputs(model, inputs, labels)
