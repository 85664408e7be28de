"""Adapters of PEFT: where their dropout is, on plain and on quantized base weights."""

import logging

import pytest
import torch
from torch import Tensor, nn

import undrop
from engine_helpers import assert_mean
from undrop.errors import EngineError, NoDropoutError

peft = pytest.importorskip("peft", reason="peft is not installed")
hf = pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.randint(1, 11, (4, 5), generator=torch.Generator().manual_seed(0))
LORA = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
}


def base() -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        **{"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5},
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    )
    return hf.LlamaForCausalLM(config).double()


def adapted(model: nn.Module | None = None, dropout: float = 0.3, zero: bool = False, **options):
    config = peft.LoraConfig(
        **{"r": 2, "target_modules": ["q_proj", "down_proj"], "lora_dropout": dropout, **options}
    )
    model = peft.get_peft_model(base() if model is None else model, config).double().train()
    if not zero:
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.5)
    return model


def step(model, objective=None, **options):
    objective = objective or undrop.Analytic(generator=torch.Generator().manual_seed(3), **options)
    found = objective(model, {"input_ids": IDS, "labels": IDS})
    found.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    model.zero_grad()
    return found, gradient


@pytest.mark.parametrize("kind", LORA)
def test_lora_dropout_is_a_site_at_every_adapter(kind):
    model = adapted(**LORA[kind])
    sites = undrop.sites(model, {"input_ids": IDS})
    assert [s.p for s in sites] == [0.3, 0.3]
    assert [s.name.split(".")[-3:] for s in sites] == [
        ["q_proj", "lora_dropout", "default"],
        ["down_proj", "lora_dropout", "default"],
    ]
    found, gradient = step(model)
    assert found.engine == "antithetic: one stacked pass"
    assert found.parts["explicit"] > 0
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("kind", LORA)
def test_the_explicit_part_of_lora_has_the_exact_mean(kind):
    model, inputs = adapted(**LORA[kind]), {"input_ids": IDS, "labels": IDS}
    exact = undrop.Analytic(engine="exact", implicit=False)(model, inputs).parts["explicit"]
    one = undrop.Analytic(implicit=False, generator=torch.Generator().manual_seed(5))
    draws = torch.tensor([one(model, inputs).parts["explicit"] for _ in range(150)])
    assert_mean(draws, torch.tensor(exact))


def test_the_table_of_sites_says_that_lora_dropout_does_not_act_while_b_is_0():
    new, trained = (undrop.sites(adapted(zero=z), {"input_ids": IDS}) for z in (True, False))
    assert [s.acts for s in new] == [False, False]
    assert repr(new).count("NO, u = 0") == 2
    assert [s.acts for s in trained] == [True, True]
    assert "acts" not in repr(trained)


def test_without_lora_dropout_there_is_no_site():
    with pytest.raises(NoDropoutError, match=r"lora_dropout = 0"):
        undrop.sites(adapted(dropout=0.0), {"input_ids": IDS})


def test_a_model_with_ia3_is_refused_because_it_has_no_dropout():
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    model = peft.get_peft_model(base(), config)
    with pytest.raises(NoDropoutError, match="adapters of the kind IA3 have no dropout"):
        undrop.sites(model, {"input_ids": IDS})


def lines(caplog) -> list[str]:
    return [r.message for r in caplog.records if "had no effect" in r.message]


def test_one_step_with_b_zero_logs_no_warning(caplog):
    model = adapted(zero=True)
    objective = undrop.Analytic()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    parts = []
    with caplog.at_level(logging.WARNING, "undrop"):
        for _ in range(3):
            found = objective(model, {"input_ids": IDS, "labels": IDS})
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            parts.append(found.parts["explicit"])
    assert parts[0] < 1e-12 < parts[1]
    assert not lines(caplog)


def test_two_steps_in_which_dropout_has_no_effect_log_one_warning(caplog):
    """B stays 0, as if it were frozen, while other weights train."""
    model = adapted(zero=True)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_A" in name or "norm" in name)
    objective = undrop.Analytic()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    with caplog.at_level(logging.WARNING, "undrop"):
        for _ in range(4):
            objective(model, {"input_ids": IDS, "labels": IDS}).backward()
            optimizer.step()
    (line,) = lines(caplog)
    assert "two successive steps (u = 0 at base_model" in line
    assert "lora_dropout.default" in line


def test_micro_batches_of_one_step_log_no_warning(caplog):
    model, objective = adapted(zero=True), undrop.Analytic()
    with caplog.at_level(logging.WARNING, "undrop"):
        for _ in range(3):
            objective(model, {"input_ids": IDS, "labels": IDS}).backward()
    assert not lines(caplog)


class Dequantized(torch.autograd.Function):
    """x Wᵀ with W = scale · codes, computed in each pass, as 8-bit and 4-bit layers do."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return x @ (codes.to(x) * scale.to(x)).t()

    @staticmethod
    def backward(ctx, grad: Tensor):
        codes, scale = ctx.saved_tensors
        return grad @ (codes.to(grad) * scale.to(grad)), None, None


class Quantized(nn.Linear):
    """A stand-in for a quantized layer: integer codes, one scale per row, no gradient."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        top = 2 ** (bits - 1) - 1
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / top
        codes = (linear.weight.detach() / scale).round().to(torch.int8)
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return Dequantized.apply(x, self.weight, self.scale)

    def dequantized(self) -> Tensor:
        return self.weight.to(self.scale) * self.scale


def quantized(bits: int, plain: bool) -> nn.Module:
    """A model with quantized linear layers, or with the dequantized weights."""
    model = base()
    for layer in (model.model.layers[0].self_attn, model.model.layers[0].mlp):
        for name, linear in list(layer.named_children()):
            if isinstance(linear, nn.Linear):
                found = Quantized(linear, bits)
                if plain:
                    linear.weight.data.copy_(found.dequantized())
                else:
                    setattr(layer, name, found)
    return model


def with_adapters(model: nn.Module, **options) -> nn.Module:
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.3, **options
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config).train()
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn_like(weight, dtype=torch.float64) * 0.3
    return model


class Packed(Quantized):
    """Packs its weights for inference the first time that it runs in eval mode, as bitsandbytes does."""

    packed = False

    def forward(self, x: Tensor) -> Tensor:
        self.packed = self.packed or not (self.training or x.requires_grad)
        return super().forward(x)


def test_looking_for_sites_does_not_pack_weights_for_inference():
    model = base()
    attention = model.model.layers[0].self_attn
    attention.q_proj = Packed(attention.q_proj, 4)
    model = with_adapters(model)
    undrop.sites(model, {"input_ids": IDS})
    (layer,) = (m for m in model.modules() if isinstance(m, Packed))
    assert not layer.packed
    assert layer.training


@pytest.mark.parametrize("bits", [8, 4])
def test_a_step_on_quantized_weights_equals_that_on_the_dequantized_weights(bits):
    codes = with_adapters(quantized(bits, plain=False))
    weights = with_adapters(quantized(bits, plain=True))
    (found, ours), (expected, theirs) = step(codes), step(weights)
    assert found.engine == expected.engine == "antithetic: one stacked pass"
    assert found.parts == pytest.approx(expected.parts, rel=1e-9)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)


def test_the_tangent_engine_refuses_a_quantized_layer_by_name():
    with pytest.raises(EngineError, match=r"no proven rule for .*Dequantized"):
        step(with_adapters(quantized(8, plain=False)), engine="tangent")


@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig"])
def test_rank_and_module_dropout_are_sites(kind):
    config = getattr(peft, kind)(
        r=2, target_modules=["q_proj"], rank_dropout=0.2, module_dropout=0.1, init_weights=False
    )
    model = peft.get_peft_model(base(), config).double().train()
    sites = undrop.sites(model, {"input_ids": IDS})
    assert [(s.kind, s.p) for s in sites] == [("module-drop", 0.1), ("mask", pytest.approx(0.2))]
    assert not sites.unaccounted
    found, gradient = step(model)
    assert found.parts["explicit"] > 0
    assert bool(gradient.isfinite().all())


def bitsandbytes(bits):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return hf.BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **(options if bits == 4 else {}))


def torchao():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    return hf.TorchAoConfig(quant_type=quantization.Int8WeightOnlyConfig())


PACKAGES = {
    "bitsandbytes, 4 bits": lambda: bitsandbytes(4),
    "bitsandbytes, 8 bits": lambda: bitsandbytes(8),
    "torchao, 8 bits": torchao,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES)
def test_a_step_on_real_quantized_layers_equals_that_on_the_dequantized_weights(package, tmp_path):
    config = hf.LlamaConfig(
        **{"vocab_size": 11, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1},
        **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    )
    torch.manual_seed(0)
    plain = hf.LlamaForCausalLM(config)
    plain.save_pretrained(tmp_path)
    codes = hf.LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=PACKAGES[package](), device_map="cpu", dtype=torch.float32
    ).train()
    with torch.no_grad():
        for name, linear in plain.model.named_modules():
            if isinstance(linear, nn.Linear):
                width = torch.eye(linear.in_features)
                linear.weight.copy_(codes.model.get_submodule(name)(width).t())
    steps = []
    for model in (codes, plain):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.3)
        model = peft.get_peft_model(model, config).train()
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data = torch.randn_like(weight) * 0.05
        assert [site.acts for site in undrop.sites(model, {"input_ids": IDS})] == [True, True]
        steps.append(step(model))
    (found, ours), (expected, theirs) = steps
    assert found.engine == expected.engine == "antithetic: one stacked pass"
    assert found.parts == pytest.approx(expected.parts, rel=2e-3)
    assert float((ours - theirs).norm() / theirs.norm()) < 2e-3
