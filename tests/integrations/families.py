"""One-layer Transformers models with random weights, a batch for each, and the sites they have."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.models.gpt2.modeling_gpt2 import eager_attention_forward as gpt2_attention

V = 7  # words

T5_HAS_SDPA = hf.T5ForConditionalGeneration._supports_sdpa  # from Transformers 5 on
VIT_HAS_ENCODER = hasattr(hf.models.vit.modeling_vit, "ViTEncoder")  # in older ones
GPT2_CALLS_A_MODULE = "attn_dropout" in gpt2_attention.__code__.co_names  # in older ones

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 4, "intermediate_size": 4}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BERT = {**SMALL, "vocab_size": V, "max_position_embeddings": 6, "num_labels": 3}


def gpt2(attention: str) -> hf.PreTrainedModel:
    drops = {"embd_pdrop": 0.2, "attn_pdrop": 0.3, "resid_pdrop": 0.1}
    size = {"vocab_size": V, "n_positions": 6, "n_embd": 4, "n_layer": 1, "n_head": 1}
    config = hf.GPT2Config(**size, **drops, **SPECIAL, attn_implementation=attention)
    return hf.GPT2LMHeadModel(config)


def bert_masked(attention: str) -> hf.PreTrainedModel:
    return hf.BertForMaskedLM(hf.BertConfig(**BERT, attn_implementation=attention))


def bert_tokens(attention: str) -> hf.PreTrainedModel:
    return hf.BertForTokenClassification(hf.BertConfig(**BERT, attn_implementation=attention))


def bert_sequence(attention: str) -> hf.PreTrainedModel:
    return hf.BertForSequenceClassification(hf.BertConfig(**BERT, attn_implementation=attention))


def llama(attention: str) -> hf.PreTrainedModel:
    config = hf.LlamaConfig(
        vocab_size=V,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.2,
        initializer_range=0.5,
        attn_implementation=attention,
        **SPECIAL,
    )
    return hf.LlamaForCausalLM(config)


def t5(attention: str) -> hf.PreTrainedModel:
    attention = attention if T5_HAS_SDPA else "eager"
    size = {"vocab_size": V, "d_model": 4, "d_kv": 4, "d_ff": 4, "num_layers": 1, "num_heads": 1}
    config = hf.T5Config(
        **size, num_decoder_layers=1, decoder_start_token_id=0, attn_implementation=attention
    )
    return hf.T5ForConditionalGeneration(config)


def vit(attention: str) -> hf.PreTrainedModel:
    config = hf.ViTConfig(
        **SMALL,
        image_size=4,
        patch_size=2,
        num_labels=3,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.2,
        attn_implementation=attention,
    )
    return hf.ViTForImageClassification(config)


def words(n: int, length: int = 3) -> Tensor:
    return torch.randint(1, V, (n, length))


def text(n: int, length: int = 3) -> dict[str, Tensor]:
    ids = words(n, length)
    mask = torch.ones_like(ids)
    mask[-1, -1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def language(n: int, length: int = 3) -> dict[str, Tensor]:
    batch = text(n, length)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def token_classes(n: int) -> dict[str, Tensor]:
    return {**text(n), "labels": torch.tensor([[0, -100, 2]]).repeat(n, 1)}


def sequence_classes(n: int) -> dict[str, Tensor]:
    return {**text(n), "labels": torch.arange(n) % 3}


def images(n: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(n, 3, 4, 4), "labels": torch.arange(n) % 3}


@dataclass(frozen=True)
class Family:
    """A model, its batches, and its sites; ``{a}`` is the name of the dropout in attention."""

    make: Callable[[str], hf.PreTrainedModel]
    batch: Callable[[int], dict[str, Tensor]]
    sites: tuple[str, ...]

    def model(self, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
        torch.manual_seed(0)
        return self.make(attention).to(dtype).train()

    def data(self, n: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        torch.manual_seed(1)
        made = self.batch(n)
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in made.items()}

    def names(self, attention: str) -> list[str]:
        """The names of its sites, in this version of Transformers."""
        if attention == "sdpa" and (self.make is not t5 or T5_HAS_SDPA):
            word = "attention"
        else:
            word = "attn_dropout" if self.make is gpt2 and GPT2_CALLS_A_MODULE else "dropout"
        return [name.format(a=word) for name in self.sites]


GPT2_SITES = ("transformer.drop", "transformer.h.0.attn.{a}", "transformer.h.0.attn.resid_dropout")
BERT_SITES = (
    "bert.embeddings.dropout",
    "bert.encoder.layer.0.attention.self.{a}",
    "bert.encoder.layer.0.attention.output.dropout",
    "bert.encoder.layer.0.output.dropout",
)
T5_SITES = (
    "encoder.dropout",
    "encoder.block.0.layer.0.SelfAttention.{a}",
    "encoder.block.0.layer.0.dropout",
    "encoder.block.0.layer.1.DenseReluDense.dropout",
    "encoder.block.0.layer.1.dropout",
    "encoder.dropout#2",
    "decoder.dropout",
    "decoder.block.0.layer.0.SelfAttention.{a}",
    "decoder.block.0.layer.0.dropout",
    "decoder.block.0.layer.1.EncDecAttention.{a}",
    "decoder.block.0.layer.1.dropout",
    "decoder.block.0.layer.2.DenseReluDense.dropout",
    "decoder.block.0.layer.2.dropout",
    "decoder.dropout#2",
)
VIT_SITES = (
    (
        "vit.embeddings.dropout",
        "vit.encoder.layer.0.attention.attention.{a}",
        "vit.encoder.layer.0.attention.output.dropout",
        "vit.encoder.layer.0.output.dropout",
    )
    if VIT_HAS_ENCODER
    else (
        "vit.embeddings.dropout",
        "vit.layers.0.attention.{a}",
        "vit.layers.0.dropout",
        "vit.layers.0.dropout#2",
    )
)

FAMILIES = {
    "gpt2": Family(gpt2, language, (*GPT2_SITES, "transformer.h.0.mlp.dropout")),
    "bert-masked": Family(bert_masked, language, BERT_SITES),
    "bert-tokens": Family(bert_tokens, token_classes, (*BERT_SITES, "dropout")),
    "bert-sequence": Family(bert_sequence, sequence_classes, (*BERT_SITES, "dropout")),
    "llama": Family(llama, language, ("model.layers.0.self_attn.{a}",)),
    "t5": Family(t5, partial(language, length=2), T5_SITES),
    "vit": Family(vit, images, VIT_SITES),
}
