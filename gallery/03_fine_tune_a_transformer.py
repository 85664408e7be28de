# %% [markdown]
# # Fine-tune a Transformers model
#
# `UndropTrainer` takes the place of `transformers.Trainer`. To run without a download, this notebook uses a
# tiny BERT with random weights and a made-up task: are most tokens of a sequence from the upper half of the
# vocabulary? One in five training labels is wrong. Replace the model and the data with your own.

# %%
import matplotlib.pyplot as plt
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import undrop
from undrop.integrations.transformers import UndropTrainer


def model():
    set_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


# %%
def examples(count, seed, wrong=0.0):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(40, (count, 11), generator=draw)
    labels = ((tokens >= 20).sum(1) > 5).long()
    labels ^= (torch.rand(count, generator=draw) < wrong).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


train, validation = examples(256, 1, wrong=0.2), examples(512, 2)

# %% [markdown]
# BERT has dropout in its embeddings, in attention, and after every block. undrop finds all these dropouts, including
# the `dropout_p` of scaled dot product attention, which is not a module.

# %%
batch = {name: torch.stack([row[name] for row in train[:4]]) for name in ("input_ids", "labels")}
print(undrop.sites(model(), batch))

# %% [markdown]
# Train twice with the same arguments: with dropout, and with undrop. The parts of the objective appear in the
# trainer's log as `undrop/loss`, `undrop/explicit` and `undrop/implicit`.

# %%
arguments = TrainingArguments(
    "out",
    max_steps=160,
    per_device_train_batch_size=32,
    learning_rate=1e-3,
    seed=0,
    eval_strategy="steps",
    eval_steps=20,
    logging_steps=20,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    log_level="error",
)
plain = Trainer(model(), arguments, train_dataset=train, eval_dataset=validation)
regularized = UndropTrainer(
    model(),
    arguments,
    train_dataset=train,
    eval_dataset=validation,
    objective=undrop.Analytic(strength=undrop.TAYLOR),
)
for trainer in (plain, regularized):
    trainer.remove_callback(PrinterCallback)  # the figure below shows the log
    trainer.train()

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(6, 6), sharex=True)
for title, trainer, style in (("dropout", plain, "o-"), ("Analytic", regularized, "s--")):
    log = [row for row in trainer.state.log_history if "eval_loss" in row]
    above.plot([row["step"] for row in log], [row["eval_loss"] for row in log], style, label=title)
above.set(ylabel="validation loss")
above.legend()
log = [row for row in regularized.state.log_history if "undrop/explicit" in row]
for part, style in (("explicit", "s--"), ("implicit", "d:")):
    values = [row[f"undrop/{part}"] for row in log]
    below.plot([row["step"] for row in log], values, style, label=part)
below.set(xlabel="step", ylabel="part of the objective")
below.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Both runs end at about the same validation loss. The explicit part is small at first and grows as the network becomes
# certain of its answers. The implicit part has mean zero: each point is one draw.
