"""The loss and targets of Transformers models in a plain loop, and their noise sites."""

import pytest
import torch
import transformers as hf

import undrop
from device import DEVICE, new_generator
from engine_helpers import EXPLICIT, design, evaluate
from integrations.families import BERT, FAMILIES, SPECIAL, V, text, words
from problems import Problem
from undrop.engines import Antithetic, Exact, Tangent
from undrop.errors import EngineError, OptionError, TargetError
from undrop.losses import MSE, BCEWithLogits, CrossEntropy, ModelLoss
from undrop.losses.model_loss import check_attention, decoder_inputs, find_task, loss_function_name

D = torch.float64
NAMES = list(FAMILIES)
ATTENTION = ["eager", "sdpa"]


def problem(name: str, attention: str, n: int = 1) -> Problem:
    family = FAMILIES[name]
    model, inputs = family.model(attention, D), family.data(n, D)
    labels = inputs.pop("labels")
    task = find_task(model, labels)
    return Problem(model, decoder_inputs(model, inputs, labels), task.targets(labels), task.loss)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", NAMES)
def test_every_site_of_a_transformers_model_is_found(name, attention):
    made = problem(name, attention)
    found = undrop.sites(made.model, made.inputs)
    assert list(found.names) == FAMILIES[name].names(attention)
    assert not any(site.active_in_eval for site in found)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", NAMES)
def test_the_explicit_part_of_a_transformers_model_is_exact_over_a_design_of_signs(name, attention):
    """Over a design of signs, the mean of the tangent engine is the exact expectation.

    The tolerance is wide because Transformers computes some norms in float32.
    """
    made = problem(name, attention)
    exact = evaluate(Exact(), made, next(iter(design(made))), EXPLICIT).parts["explicit"]
    values = [evaluate(Tangent(), made, draw, EXPLICIT).total.detach() for draw in design(made)]
    assert exact > 0
    torch.testing.assert_close(torch.stack(values).mean(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_antithetic_explicit_part_of_a_transformers_model_is_close_to_the_tangent_engines(name):
    made = problem(name, "sdpa")
    draw = next(iter(design(made)))
    tangent = evaluate(Tangent(), made, draw, EXPLICIT).total
    antithetic = evaluate(Antithetic(1e-2), made, draw, EXPLICIT).total
    torch.testing.assert_close(antithetic, tangent, rtol=2e-3, atol=0)


@torch.no_grad()
def own_loss(model, batch):
    """The loss that the model reports, without dropout."""
    model.eval()
    loss = model(**batch).loss
    model.train()
    return loss.item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["auto", "antithetic"])
def test_a_plain_loop_trains_on_the_models_own_loss(name, engine):
    """With labels as targets, or in the dict of inputs."""
    family = FAMILIES[name]
    model, batch = family.model(), family.data(3)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    expected = own_loss(model, batch)
    for step in (
        undrop.Analytic(engine=engine)(model, inputs, batch["labels"]),
        undrop.Analytic(engine=engine)(model, batch),
        undrop.NoRegularization()(model, batch),
    ):
        assert step.parts["loss"] == pytest.approx(expected, rel=2e-3)
    step.backward()
    assert "labels" in batch


def test_a_plain_loop_takes_token_ids_alone():
    model, ids = FAMILIES["gpt2"].model(), words(3)
    step = undrop.NoRegularization()(model, ids, ids)
    expected = own_loss(model, {"input_ids": ids, "labels": ids})
    assert step.parts["loss"] == pytest.approx(expected, rel=1e-5)


def test_labels_that_are_already_shifted_are_refused():
    model, ids = FAMILIES["gpt2"].model(), words(3)
    shifted = torch.cat((ids[:, 1:], torch.full((3, 1), -100)), 1)
    with pytest.raises(
        TargetError, match=r"already the next tokens of input_ids.*CrossEntropy\(\)"
    ):
        undrop.Analytic()(model, {"input_ids": ids}, shifted)
    step = undrop.NoRegularization(loss=CrossEntropy())(model, {"input_ids": ids}, shifted)
    expected = own_loss(model, {"input_ids": ids, "labels": ids})
    assert step.parts["loss"] == pytest.approx(expected, rel=1e-5)


def shifted_batch():
    """A language model, its batch, the inputs alone, and the labels at t + 1."""
    model, batch = FAMILIES["gpt2"].model(), FAMILIES["gpt2"].data(1)
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return model, batch, inputs, shifted


def test_diagnose_uses_the_models_own_loss():
    model, batch, inputs, shifted = shifted_batch()

    def diagnosed(batch, **options):
        how = {"implicit": False, "seconds": 60.0, "draws": 3, "progress": False}
        generator = new_generator(0)
        return undrop.diagnose(model, [batch], generator=generator, **how, **options).explicit

    wanted = diagnosed((inputs, shifted), loss=CrossEntropy())
    assert diagnosed(batch) == wanted
    assert diagnosed((inputs, batch["labels"])) == wanted
    assert diagnosed((inputs, batch["labels"]), loss=CrossEntropy()) != wanted


def test_check_uses_the_models_own_loss():
    model, batch, inputs, shifted = shifted_batch()
    exact = undrop.Analytic(engine="exact", implicit=False, loss=CrossEntropy())
    wanted = exact(model, inputs, shifted).parts["explicit"]
    objective = undrop.Analytic(engine="exact", implicit=False)
    for given in (batch, (inputs, batch["labels"])):
        found = undrop.check(objective, model, given, seconds=0.01, draws=4, progress=False)
        assert found.explicit.value == pytest.approx(wanted, rel=1e-4)
    assert isinstance(objective.loss, ModelLoss)


def test_one_objective_trains_each_model_with_its_own_loss():
    """The second step begins before the backward pass of the first one."""
    objective = undrop.Dropout(k=2)
    family, number = FAMILIES["gpt2"], classifier(num_labels=1)
    batch = {**text(2), "labels": torch.tensor([0.5, 1.0])}
    first = objective(family.model(), family.data(2))
    second = objective(number, batch)
    assert first.parts["loss"] > second.parts["loss"] > 0.0


def test_a_model_without_its_own_loss_has_no_loss_function_name():
    assert loss_function_name(hf.BertModel(hf.BertConfig(**BERT))) is None
    assert loss_function_name(torch.nn.Linear(2, 3)) is None


def loss_is_verified(model, batch, labels):
    """Prepare a batch, which raises an error if the loss differs from the model's own."""
    loss = ModelLoss()
    loss.prepare(model, batch, labels)
    return model in loss._verified


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
def test_each_kind_of_classifier_has_its_loss(config, labels, loss):
    model, batch = classifier(**config), text(2)
    if loss is MSE:
        model.config.problem_type = "regression"  # or Transformers takes whole numbers for classes
    task = find_task(model, labels)
    assert type(task.loss) is loss
    given = labels.float() if loss is MSE else labels
    assert loss_is_verified(model, batch, given)


def test_without_problem_type_one_number_is_regression():
    assert isinstance(find_task(classifier(num_labels=1), torch.tensor([0.5])).loss, MSE)


def test_label_smoothing_is_for_class_labels_only():
    task = find_task(classifier(), torch.tensor([1]), 0.1)
    assert task.loss.label_smoothing == 0.1
    with pytest.raises(OptionError, match=r"label_smoothing_factor is for class labels.*MSE"):
        find_task(classifier(num_labels=1), torch.tensor([0.5]), 0.1)


def test_a_head_that_undrop_does_not_know_is_refused():
    model = hf.BertForQuestionAnswering(hf.BertConfig(**BERT))
    with pytest.raises(OptionError, match=r"ForQuestionAnsweringLoss.*pass loss=.*`undrop_task`"):
        find_task(model, torch.tensor([1]))


@pytest.mark.skipif(
    DEVICE.type not in ("cpu", "cuda"),
    reason="the router of Mixtral has its own branch for the CPU",
)
def test_a_model_whose_loss_has_an_unknown_part_is_refused():
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
    with pytest.raises(OptionError, match=r"computes a loss of .* has a part that undrop does not"):
        undrop.Analytic()(model, {"input_ids": ids}, ids)


def test_the_loss_is_not_verified_on_a_batch_whose_labels_are_all_ignored():
    family = FAMILIES["gpt2"]
    model, inputs = family.model(), family.data(2)
    labels = torch.full_like(inputs.pop("labels"), -100)
    assert not loss_is_verified(model, inputs, labels)


def test_attention_that_hides_its_dropout_is_refused():
    model = FAMILIES["llama"].model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(EngineError, match=r"attention_dropout = 0.2.*'flash_attention_2'.*'sdpa'"):
        check_attention(model)
    model.config.attention_dropout = 0.0
    check_attention(model)


def test_the_decoder_reads_the_shifted_labels():
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
