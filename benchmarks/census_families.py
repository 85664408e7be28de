"""The model families of the census: each built at a tiny size, without a download."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from without_torchvision import import_timm

P = 0.1
MOST_PARAMETERS = 120_000_000


class NotBuilt(Exception):
    """No tiny model of a family could be built; the message is the reason."""


class Built(NamedTuple):
    """A model, and inputs that it runs on."""

    model: nn.Module
    inputs: Any


def first_that_works(tries: Iterator[Callable[[], Built]]) -> Built:
    """Return the first model that builds and runs."""
    reason = ""
    for build in tries:
        try:
            built = build()
            run(built)
            return built
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {error}"
    raise NotBuilt(" ".join(reason.split())[:90] or "no generic arguments fit")


def run(built: Built) -> Any:
    """Run a model on its inputs, without gradients, in train mode."""
    built.model.train()
    with torch.no_grad():
        if isinstance(built.inputs, dict):
            return built.model(**built.inputs)
        if isinstance(built.inputs, tuple):
            return built.model(*built.inputs)
        return built.model(built.inputs)


def not_too_big(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model unless it has too many parameters; they are counted on the meta device."""
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in make().parameters())
    except Exception:
        count = 0
    if count > MOST_PARAMETERS:
        raise NotBuilt(f"{count / 1e6:.0f} M parameters at the smallest size tried")
    return make()


# --- timm: a family is a model file ---------------------------------------------------------------

SMALL = ["test_", "atto", "femto", "pico", "zepto", "nano", "xxs", "micro", "tiny", "mini", "_xs"]
SMALL += ["_s0", "_b0", "_m0", "lite", "small", "14", "18", "_s"]


def timm_families() -> list[str]:
    """The model files of timm."""
    return list(import_timm().list_modules())


def timm_model(family: str) -> Built:
    """Build a small variant of a model file, on small images if it accepts them."""
    timm = import_timm()

    def rank(name: str) -> tuple[int, int, str]:
        found = next((i for i, word in enumerate(SMALL) if word in name), len(SMALL))
        size = re.search(r"_(\d{3})(?:$|_)", name)
        return found, int(size[1]) if size else 0, name

    variants = sorted(timm.list_models(module=family), key=rank)[:3]
    drops = ({"drop_rate": P, "drop_path_rate": P}, {"drop_rate": P}, {"drop_path_rate": P}, {})

    def tries() -> Iterator[Callable[[], Built]]:
        for name in variants:
            for drop in drops:
                for size, given in ((64, True), (64, False), (None, False)):
                    yield lambda n=name, d=drop, s=size, g=given: one(n, d, s, g)

    def one(name: str, drop: dict[str, float], size: int | None, given: bool) -> Built:
        more = {"img_size": size} if given else {}
        model = not_too_big(
            lambda: timm.create_model(name, pretrained=False, num_classes=10, **drop, **more)
        )
        side = size or model.default_cfg["input_size"][-1]
        return Built(model, torch.randn(2, 3, side, side))

    return first_that_works(tries())


# --- Transformers: a family is a model type -------------------------------------------------------

SIZES: list[tuple[str, Any]] = [  # the first pattern that matches the whole name decides
    (r"(.*_)?vocab(ulary)?_size(_.*)?|n_vocab|.*codebook_size|type_vocab_size", 64),
    (r".*(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|_depth|depth)", 2),
    (r".*layers_block_type|layer_types", None),
    (
        r"(.*_)?(num_(attention_|key_value_|self_attention_|cross_attention_)?heads?|n_heads?)(_.*)?",
        4,
    ),
    (r".*(encoder|decoder)_attention_heads|attention_heads|num_global_key_value_heads", 4),
    (r"(.*_)?head_dim|d_kv|.*kv_channels|attention_head_size", 16),
    (r".*(intermediate|ffn|feedforward|mlp|d_ff|d_inner|n_inner)(_dim|_size|_hidden_size)?", 32),
    (
        r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_size|width|emb_dim|dim)",
        32,
    ),
    (r"(.*_)?(projection_dim|projection_size|output_dim|classifier_proj_size)", 32),
    (r"(.*_)?(max_position_embeddings|n_positions|max_.*_positions|n_ctx)", 64),
    (r"(.*_)?image_size|img_size|input_size", 32),
    (r"(.*_)?patch_size", 8),
    (r"n_routed_experts|num_(local_)?experts", 16),
    (r"(.*_)?num_queries|.*query_tokens?|num_latents|num_object_queries", 8),
]
STAGES = re.compile(r"(.*_)?(depths|hidden_sizes|embed_dims|num_heads|num_attention_heads|layers)$")
IMAGE = re.compile("image_size|img_size|input_size|patch_size|num_queries|query_token")
WIDTH = re.compile("hidden_size|hidden_dim|d_model|n_embd|dim|width|head")
OPTIONS: dict[str, dict[str, Any]] = {  # what a type can't be built without
    "autoformer": {"prediction_length": 8},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
    "diffllama": {"attention_dropout": 0.0},
}
TOKEN = re.compile(r".*(_token_id|_token_index|_id)$")


def transformers_families() -> list[str]:
    """The model types of Transformers that have a model."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return list(auto.MODEL_MAPPING_NAMES)


def tiny_value(name: str, value: Any, level: int) -> Any:
    """Return a tiny value for an option of a configuration, or the value itself."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)) and ("drop" in name and "_id" not in name):
        return P if value in (0, 0.0) or isinstance(value, float) else value
    if isinstance(value, (list, tuple)) and STAGES.match(name) and level < 2:
        if name.endswith("depths"):
            return [1] * (len(value) - 1) + [2]
        if all(isinstance(v, int) for v in value) and "heads" not in name and "layers" not in name:
            return [max(16, 16 * v // max(value[0], 1)) for v in value]
        return [4 for _ in value] if "heads" in name else value
    if not isinstance(value, int):
        return value
    if TOKEN.match(name):
        return value if value < 64 else 60 + value % 4
    for pattern, tiny in SIZES:
        if re.fullmatch(pattern, name):
            kept = (level >= 1 and IMAGE.search(name)) or (level >= 2 and WIDTH.search(name))
            return value if tiny is None or kept else min(value, tiny)
    return value


def tiny_options(config: Any, level: int) -> dict[str, Any]:
    """Return options for a tiny configuration like this one; its parts become tiny too."""
    signature = inspect.signature(type(config).__init__).parameters
    options: dict[str, Any] = {}
    for name in signature:
        if name in ("self", "kwargs") or not hasattr(config, name):
            continue
        value = getattr(config, name)
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            part = tiny_options(value, level)
            options[name] = type(value)(**part)
        else:
            tiny = tiny_value(name, value, level)
            if tiny is not value and tiny != value:
                options[name] = tiny
    return options


def transformers_model(family: str) -> Built:
    """Build a tiny model of a type, with inputs that it accepts."""
    transformers = importlib.import_module("transformers")
    kind = transformers.CONFIG_MAPPING[family]
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    cls = auto.MODEL_MAPPING[kind]
    cls = cls[0] if isinstance(cls, (list, tuple)) else cls

    def build(level: int) -> nn.Module:
        options = {**tiny_options(kind(), level), **OPTIONS.get(family, {})}
        return not_too_big(lambda: cls(kind(**options)))

    reason = ""
    for level in range(3):
        try:
            model = build(level)
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {error}"
            continue
        parts = (model.config, getattr(model.config, "vision_config", None))
        sides = [getattr(part, "image_size", None) for part in parts]
        tries = transformers_inputs(model, next((s for s in sides if isinstance(s, int)), 32))
        try:
            return first_that_works((lambda m=model, i=i: Built(m, i)) for i in tries)
        except NotBuilt as error:
            reason = reason or str(error)
    raise NotBuilt(" ".join(reason.split())[:90])


def transformers_inputs(model: nn.Module, side: int) -> Iterator[dict[str, Any]]:
    """Yield inputs of several kinds: text, images, video, sound, time series."""
    takes = inspect.signature(model.forward).parameters
    ids = torch.randint(3, 50, (2, 12))
    text = {"input_ids": ids} if "input_ids" in takes else {}
    if "decoder_input_ids" in takes:
        text["decoder_input_ids"] = ids[:, :6]
    yield from ([text] if "input_ids" in text else [])
    if "grid_thw" in takes:
        yield patches(model)
    if "bbox" in takes:
        yield from ({**text, "bbox": torch.ones(2, 12, n, dtype=torch.long)} for n in (4, 8))
    if "use_cache" in takes:
        yield {**text, "use_cache": False}
    if "pixel_values" in takes:
        yield {"pixel_values": torch.randn(2, 3, side, side), **text}
        yield from ({"pixel_values": torch.randn(2, 3, s, s)} for s in (side, 64, 224))
    if "pixel_values_videos" in takes or "pixel_values" in takes:
        name = "pixel_values_videos" if "pixel_values_videos" in takes else "pixel_values"
        yield {name: torch.randn(2, 16, 3, side, side)}
    more = {"decoder_input_ids": ids[:, :6]} if "decoder_input_ids" in takes else {}
    if "input_values" in takes:
        for shape in ((2, 4000), (2, 1, 4000), (2, 24, 80), (2, 24, 128), (2, 1024, 128)):
            yield {"input_values": torch.randn(shape), **more, **text}
    if "input_features" in takes:
        for shape in ((24, 80), (80, 24), (80, 128), (128, 128), (24, 160), (24, 128), (80, 3000)):
            yield {"input_features": torch.randn(2, *shape), **more, **text}
    if "inputs_embeds" in takes:
        yield {"inputs_embeds": torch.randn(2, 12, 32)}
    if "past_values" in takes:
        yield series(model)
    if "hidden_states" in takes:
        yield {"hidden_states": torch.randn(2, 12, 32)}


def patches(model: nn.Module) -> dict[str, Any]:
    """Return an image as a row of 4 x 4 patches, which vision towers like Qwen's expect."""
    config: Any = model.config
    channels = getattr(config, "in_channels", getattr(config, "in_chans", 3))
    wide = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    name = next(iter(inspect.signature(model.forward).parameters))
    return {name: torch.randn(16, wide), "grid_thw": torch.tensor([[1, 4, 4]])}


def series(model: nn.Module) -> dict[str, Any]:
    """Return inputs of a time series model."""
    config: Any = model.config
    context = getattr(config, "context_length", 32)
    length = context + max(getattr(config, "lags_sequence", None) or [0])
    takes = inspect.signature(model.forward).parameters
    wide = getattr(config, "num_input_channels", None)
    shape = (2, length, wide) if wide else (2, length)
    given: dict[str, Any] = {"past_values": torch.randn(shape)}
    if "past_observed_mask" in takes:
        given["past_observed_mask"] = torch.ones(shape)
    if "past_time_features" in takes:
        given["past_time_features"] = torch.zeros(2, length, config.num_time_features)
        ahead = config.prediction_length
        given["future_values"] = torch.randn(2, ahead)
        given["future_time_features"] = torch.zeros(2, ahead, config.num_time_features)
    return given


# --- PEFT: a family is a method -------------------------------------------------------------------


def peft_families() -> list[str]:
    """The methods of PEFT."""
    mapping = importlib.import_module("peft.mapping")
    return [kind.name for kind in mapping.PEFT_TYPE_TO_CONFIG_MAPPING]


def peft_model(family: str) -> Built:
    """Build a tiny Llama with an adapter."""
    peft = importlib.import_module("peft")
    mapping = importlib.import_module("peft.mapping")
    transformers = importlib.import_module("transformers")
    kind = mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[family]]
    fields = inspect.signature(kind).parameters
    drop = {
        f: P
        for f, v in fields.items()
        if "dropout" in f
        and isinstance(v.default, (int, float))
        and not isinstance(v.default, bool)
    }
    base: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4, "group_size": 4}
    targets: list[dict[str, Any]] = [{"target_modules": ["q_proj", "v_proj"]}, {}]
    targets.insert(1, {**targets[0], "feedforward_modules": []})
    rank: list[dict[str, Any]] = [
        {},
        {"r": 4},
        {"adapter_len": 4, "adapter_layers": 2},
        {"total_step": 10},
    ]
    rank += [
        {"oft_block_size": 4, "r": 0},
        {"n_frequency": 16},
        {"block_size": 4},
        {"boft_block_size": 4},
    ]
    rank += [{"vector_length": 4, "num_vectors": 16}, {"num_tasks": 2}, {"token_indices": [1, 2]}]

    def one(options: dict[str, Any]) -> Built:
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        known = {k: v for k, v in options.items() if k in fields}
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), kind(**known))
        inputs = {"input_ids": torch.randint(3, 50, (2, 12))}
        if "num_tasks" in options:
            inputs["task_ids"] = torch.zeros(2, dtype=torch.long)
        return Built(model, inputs)

    return first_that_works(
        (lambda o={**base, **drop, **t, **r}: one(o)) for r in rank for t in targets
    )


# --- PyG: a family is a layer, a model, or a function that drops ----------------------------------


def pyg_families() -> list[str]:
    """The layers and models of PyG, and its functions that drop parts of a graph."""
    nn_ = importlib.import_module("torch_geometric.nn")
    utils = importlib.import_module("torch_geometric.utils")
    classes = [n for m in (nn_.conv, nn_.models, nn_.pool) for n in m.__all__]
    drops = [f"utils.{n}" for n in utils.__all__ if n.startswith(("dropout_", "mask_feature"))]
    return [n for n in dict.fromkeys(classes) if n[:1].isupper()] + drops


class Dropping(nn.Module):
    """A GCN after a function that drops a part of the graph."""

    def __init__(self, gcn: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.gcn, self.function = gcn, function

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        """Drop, then convolve."""
        if self.function.__name__ == "mask_feature":
            return self.gcn(self.function(x, p=P)[0], edge_index)
        return self.gcn(x, self.function(edge_index, p=P)[0])


def pyg_model(family: str) -> Built:
    """Build a layer or model, with a small graph as input."""
    pyg = importlib.import_module("torch_geometric.nn")
    x = torch.randn(10, 8)
    edges = torch.randint(0, 10, (2, 30))
    batch = torch.zeros(10, dtype=torch.long)
    if family.startswith("utils."):
        function = getattr(importlib.import_module("torch_geometric.utils"), family[6:])
        return first_that_works(
            iter([lambda: Built(Dropping(pyg.GCN(8, 8, 2, 3, dropout=P), function), (x, edges))])
        )
    cls = getattr(pyg, family)
    takes = inspect.signature(cls.__init__).parameters
    several = any(v.kind == v.VAR_KEYWORD for v in takes.values())
    drop = {n: P for n in takes if "drop" in n and n != "dropout_fn"}
    if family in pyg.models.__all__ and "dropout" not in takes and several:
        drop = {"dropout": P}
    wide = pyg.Sequential("x", [(nn.Linear(8, 8), "x -> x")])
    positional: list[tuple[Any, ...]] = [
        (8, 8), (8,), (), (8, 8, 2), (8, 8, 2, 3), (8, 8, 3, 2), (8, 8, 3, 2, 2), (8, 8, 4, 2, 2),
        (wide,), (wide, wide), ([8, 8, 8],), (10, 8), (10, 8, 2), (8, 8, 8, 2),
    ]  # fmt: skip
    named = {"ratio": 0.5, "heads": 2, "edge_dim": 8, "K": 2, "num_relations": 3, "alpha": 0.1}
    named |= {"dim": 1, "kernel_size": 2, "num_layers": 2, "num_timesteps": 2, "num_nodes": 10}
    named |= {"aggregators": ["mean"], "scalers": ["identity"], "deg": torch.tensor([0, 5, 5])}
    needed = [n for n, v in takes.items() if v.default is v.empty and n in named]
    calls = [(x, edges), (x, edges, torch.randn(30, 8)), (x, edges, None, batch), (x, edges, batch)]
    calls += [(x, edges, torch.rand(30, 1)), (x,), (x, batch), (x, torch.randn(10, 3), edges)]
    calls += [(x, x, edges), (torch.randint(1, 9, (10,)), torch.randn(10, 3), batch), (edges,)]
    calls += [(x, edges, torch.randn(30, 8), batch), (x, edges, torch.randint(0, 3, (30,)))]

    def tries() -> Iterator[Callable[[], Built]]:
        for args in positional:
            for more in ({n: named[n] for n in needed}, {}):
                try:
                    model = cls(*args, **more, **drop)
                except Exception:  # the next arguments may be the right ones
                    continue
                yield from ((lambda m=model, i=inputs: Built(m, i)) for inputs in calls)

    return first_that_works(tries())


LIBRARIES: dict[str, tuple[Callable[[], list[str]], Callable[[str], Built]]] = {
    "timm": (timm_families, timm_model),
    "transformers": (transformers_families, transformers_model),
    "peft": (peft_families, peft_model),
    "pyg": (pyg_families, pyg_model),
}
