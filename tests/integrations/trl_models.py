"""A tiny language model, a tokenizer of whole words and data for TRL's trainers, without downloads."""

from typing import Any

import torch
import transformers as hf
from torch import nn

WORDS = ["<pad>", "<eos>", *"abcdefghij"]


def tokenizer() -> hf.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model(p: float = 0.2, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = hf.GPT2Config(
        **{"vocab_size": len(WORDS), "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 2},
        **{"embd_pdrop": p, "attn_pdrop": p, "resid_pdrop": p, "initializer_range": 0.4},
        **{"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0},
    )
    return hf.GPT2LMHeadModel(config)


def arguments(folder: Any, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        **options,
    }
