"""The Trainer of Transformers: train a small GPT-2 on Python's documentation, without a download.

pip install '.[transformers]' && python examples/transformers_trainer.py
"""

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
import transformers

import undrop
from undrop.integrations.transformers import UndropTrainer

LENGTH = 64


def windows(start, count):
    """Return windows of bytes. The labels are the same bytes, because the model shifts them itself."""
    text = " ".join(topics[name] for name in sorted(topics)).encode()
    rows = torch.tensor(list(text[start : start + count * LENGTH])).view(count, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(objective, steps, folder):
    transformers.set_seed(0)
    size = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    drop = {"embd_pdrop": 0.2, "resid_pdrop": 0.2, "attn_pdrop": 0.2}
    config = transformers.GPT2Config(**size, **drop, bos_token_id=0, eos_token_id=0)
    quiet = {"logging_steps": steps, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    schedule = {"max_steps": steps, "warmup_steps": steps // 10, "learning_rate": 3e-3}
    batch = {"per_device_train_batch_size": 16, "use_cpu": True}
    trainer = UndropTrainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(folder, **batch, **schedule, **quiet),
        train_dataset=windows(0, 60),
        eval_dataset=windows(300_000, 200),
        objective=objective,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0], trainer.evaluate()["eval_loss"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)  # enough for a net this small
    print(f"{'objective':16} {'eval loss':>9}   train loss, explicit and implicit part")
    for objective in (undrop.NoRegularization, undrop.Dropout, undrop.Analytic):
        with tempfile.TemporaryDirectory() as folder:
            logged, loss = train(objective(), options.steps, folder)
        parts = (logged.get(f"undrop/{part}", 0.0) for part in ("loss", "explicit", "implicit"))
        print(f"{objective.__name__:16} {loss:9.3f}   {', '.join(f'{part:.3f}' for part in parts)}")


if __name__ == "__main__":
    main()
