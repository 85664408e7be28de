"""Models that fuse their output layer with their loss, as Liger's kernels do, and return no logits."""

import pytest
import torch

import undrop
from device import new_generator
from undrop.errors import OutputError
from undrop.losses import LinearCrossEntropy

hf = pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.randint(1, 11, (4, 5), generator=new_generator(0))


def gpt2():
    torch.manual_seed(0)
    config = hf.GPT2Config(
        **{"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2},
        **{"bos_token_id": 0, "eos_token_id": 0},
    )
    return hf.GPT2LMHeadModel(config).train()


class Fused(hf.GPT2LMHeadModel):
    """Returns logits only where there are no labels to compute the loss with."""

    always = False

    def forward(self, input_ids, labels=None, **kwargs):
        output = super().forward(input_ids, labels=labels, **kwargs)
        if self.always or (self.training and labels is not None):
            loss = torch.zeros(()) if output.loss is None else output.loss
            return hf.modeling_outputs.CausalLMOutputWithPast(loss=loss)
        return output


def fused(always: bool):
    model = gpt2()
    model.__class__ = type("Fused", (Fused,), {"always": always})
    return model


def test_a_head_that_is_fused_only_with_labels_is_trained_on_its_logits():
    batch = {"input_ids": IDS, "labels": IDS}
    found, expected = (
        undrop.Analytic(generator=new_generator(1))(model, batch).parts
        for model in (fused(always=False), gpt2())
    )
    assert found == expected


def test_the_error_for_a_model_without_logits_names_the_setting_to_change():
    with pytest.raises(
        OutputError,
        match=r"with a loss but no logits, .* fused_linear_cross_entropy=False\), or return the "
        r"features and pass loss=undrop.losses.LinearCrossEntropy\(weight\)",
    ):
        undrop.Analytic()(fused(always=True), {"input_ids": IDS, "labels": IDS})


class Features(torch.nn.Module):
    """The way out: the model returns features, and its loss has the output layer."""

    def __init__(self, model):
        super().__init__()
        self.body = model.transformer

    def forward(self, input_ids):
        return self.body(input_ids).last_hidden_state[:, :-1]


def test_features_with_linear_cross_entropy_give_the_step_of_the_whole_model():
    model = gpt2()
    generators = [new_generator(1) for _ in range(2)]
    whole = undrop.Analytic(generator=generators[0])(model, {"input_ids": IDS, "labels": IDS})
    loss = LinearCrossEntropy(model.lm_head.weight)
    parts = undrop.Analytic(loss=loss, generator=generators[1])(Features(model), IDS, IDS[:, 1:])
    assert parts.parts == pytest.approx(whole.parts, rel=1e-4)
