"""Run by one process or two: UndropTrainer on four uneven examples, its weights and logs as JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor
from torch.utils.data import SequentialSampler

import undrop
from undrop.integrations import transformers as integration

V = 7


class UndropTrainer(integration.UndropTrainer):
    """Takes its examples in their order, and keeps the loss of each micro-batch.

    Older versions of Transformers have no option for the order, and round the loss in the log.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss

    def _get_train_sampler(self, *_: object) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def examples() -> list[dict[str, Tensor]]:
    """The first two examples have as many targets together as the others, but not each."""
    torch.manual_seed(1)
    ids = torch.randint(1, V, (4, 3))
    labels = ids.clone()
    labels[2] = -100
    labels[3, 2] = -100
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(4)]


def run(folder: Path, processes: int) -> dict[str, object]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=V,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        attention_dropout=0.2,
        initializer_range=0.5,
    )
    arguments = hf.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4 // processes,
        max_steps=2,
        num_train_epochs=2,
        logging_steps=2,
        save_steps=2,
        optim="sgd",
        learning_rate=0.5,
        max_grad_norm=0.0,
        average_tokens_across_devices=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    objective = undrop.Analytic(engine="exact")
    model = hf.LlamaForCausalLM(config)
    trainer = UndropTrainer(model, arguments, train_dataset=examples(), objective=objective)
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return {
        "weights": weights,
        "log": trainer.state.log_history[0],
        "rank": arguments.process_index,
    }


if __name__ == "__main__":
    found = run(Path(sys.argv[1]), processes=2)
    if found["rank"] == 0:
        (Path(sys.argv[1]) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo that still holds a tensor would abort Python when it shuts down
