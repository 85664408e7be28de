"""Models of timm, Transformers and PyG that make masks by hand: their sites and unaccounted draws."""

import math

import numpy as np
import pytest
import torch

import undrop
from engine_helpers import BOTH, Fixed, evaluate, gradient, relative, seeded
from problems import Problem
from undrop.engines import Antithetic, ScaledNoise, Tangent
from undrop.intercept import Interception
from without_torchvision import import_timm

IMAGE = torch.randn(2, 3, 32, 32)
TOKENS = torch.randint(3, 50, (2, 7))
SMALL = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}


@pytest.fixture
def timm():
    try:
        return import_timm()
    except ImportError:
        pytest.skip("timm is not installed")


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="Transformers is not installed")


def kinds(model, inputs):
    found = undrop.sites(model.train(), inputs)
    return [s.kind for s in found if s.kind not in ("dropout", "attention")], found


def test_drop_path_and_drop_block_of_timm_are_sites(timm):
    model = timm.create_model("resnet10t", num_classes=3, drop_block_rate=0.1, drop_path_rate=0.1)
    found, sites = kinds(model, IMAGE)
    assert set(found) == {"drop-path", "drop-block"}
    assert not sites.unaccounted


def test_patch_dropout_of_timm_is_unaccounted(timm):
    small = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = timm.create_model(
        "vit_tiny_patch16_224", drop_path_rate=0.1, patch_drop_rate=0.25, **small
    )
    found, sites = kinds(model, IMAGE)
    assert found == ["drop-path"] * 2
    (other,) = sites.unaccounted
    assert other.module == "patch_drop"
    assert "patch_dropout.py" in other.where


def test_the_drop_path_of_transformers_is_a_site(transformers):
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16],
        depths=[1, 2],
        num_stages=2,
        drop_path_rate=0.2,
        num_labels=3,
        layer_scale_init_value=1.0,  # with the default, 1e-6, the effect may be below float32's rounding
    )
    model = transformers.ConvNextForImageClassification(config).train()
    found, sites = kinds(model, {"pixel_values": IMAGE})
    assert found == ["drop-path"] * 2
    assert [round(s.p, 6) for s in sites] == [0.1, 0.2]
    step = undrop.Analytic(loss=undrop.CrossEntropy())(
        model, {"pixel_values": IMAGE}, torch.tensor([0, 2])
    )
    step.backward()
    assert step.parts["explicit"] > 0.0


def test_the_layer_drop_of_bart_is_a_site(transformers):
    config = transformers.BartConfig(
        vocab_size=50,
        d_model=16,
        max_position_embeddings=32,
        encoder_layerdrop=0.2,
        decoder_layerdrop=0.1,
        **SMALL,
    )
    model = transformers.BartForConditionalGeneration(config)
    inputs = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    lists = []
    for seed in range(3):
        torch.manual_seed(seed)
        found, sites = kinds(model, inputs)
        lists.append(sites)
    assert found == ["layer-drop"] * 4
    assert lists[0] == lists[1] == lists[2]
    assert not sites.unaccounted
    step = undrop.Analytic(loss=undrop.CrossEntropy())(model, inputs, TOKENS)
    step.backward()
    assert step.engine == "antithetic: one stacked pass"


WAV2VEC2 = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 20,
    "mask_time_length": 2,
}


def test_spec_augment_is_unaccounted_and_layer_drop_is_a_site(transformers):
    config = transformers.Wav2Vec2Config(**WAV2VEC2, layerdrop=0.2)
    found, sites = kinds(transformers.Wav2Vec2ForCTC(config), {"input_values": torch.randn(2, 400)})
    assert found == ["layer-drop"] * 2
    assert [other.function for other in sites.unaccounted] == ["NumPy's random"]
    assert "wav2vec2" in sites.unaccounted[0].where


def passes_from_one_seed(p, draw, epsilon=1e-5):
    """The parts and the gradient from three plain passes, all with the same random numbers."""
    outputs = []
    for size in (0.0, epsilon, -epsilon):
        np.random.seed(7)
        with Interception(p.model, ScaledNoise(draw, size)):
            outputs.append(p.model(**p.inputs).logits)
    f, plus, minus = outputs
    u = (plus - minus) / (2 * epsilon)
    total, parts = p.loss.combined(f, u, p.targets, "hessian", BOTH)
    return [float(value) for value in parts], gradient(total, p.model)


@pytest.mark.parametrize("before", [0.0, 0.2], ids=["first", "after a dropout"])
def test_spec_augment_draws_the_same_numbers_for_every_compared_pass(transformers, before):
    """NumPy's numbers mask parts of each example, so other numbers give another output."""
    config = transformers.Wav2Vec2Config(
        **WAV2VEC2,
        layerdrop=0.0,
        feat_proj_dropout=before,
        mask_time_prob=0.3,
        mask_time_min_masks=1,
        num_labels=3,
        initializer_range=0.3,
    )
    model = transformers.Wav2Vec2ForSequenceClassification(config).double().train()
    inputs = {"input_values": torch.randn(6, 400, dtype=torch.float64)}
    p = Problem(model, inputs, torch.arange(6) % 3, undrop.CrossEntropy())
    shapes = [seeded(0).shape(site) for site in undrop.sites(model, inputs)]
    signs = torch.randn(sum(map(math.prod, shapes)), dtype=torch.float64).sign()
    wanted, slope = passes_from_one_seed(p, Fixed(signs))
    for engine in (Antithetic(1e-4), Tangent()):
        for _ in range(2):
            np.random.seed(7)
            found = evaluate(engine, p, Fixed(signs), BOTH)
            assert [float(v) for v in found.parts.values()] == pytest.approx(wanted, rel=1e-5)
            assert relative(gradient(found.total, model), slope) < 1e-5
    np.random.seed(8)
    other = evaluate(Tangent(), p, Fixed(signs), BOTH)
    assert float(other.parts["loss"]) != pytest.approx(wanted[0], rel=1e-3)


def test_router_jitter_of_mixtral_is_unaccounted(transformers):
    config = transformers.MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        router_jitter_noise=0.1,
        attention_dropout=0.1,
    )
    _, sites = kinds(transformers.MixtralForCausalLM(config), {"input_ids": TOKENS})
    (other,) = sites.unaccounted
    assert other.function == "uniform_"
    assert other.module in (
        "model.layers.0.mlp",
        "model.layers.0.block_sparse_moe",
    )  # as of 5, and before


@pytest.mark.parametrize("name", ["dropout_edge", "dropout_node"])
def test_edge_and_node_dropout_of_pyg_is_unaccounted(name):
    utils = pytest.importorskip("torch_geometric.utils", reason="PyG is not installed")
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])

    class Graph(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = torch.nn.Linear(3, 3), torch.nn.Dropout(0.1)

        def forward(self, x):
            kept = getattr(utils, name)(edges, p=0.5, training=self.training)[0]
            return self.linear(self.dropout(x).index_add(0, kept[0], x[kept[1]]))

    found = undrop.sites(Graph(), torch.randn(4, 3))
    assert found.names == ("dropout",)
    assert len(found.unaccounted) == 1
    assert "torch_geometric" in found.unaccounted[0].where
