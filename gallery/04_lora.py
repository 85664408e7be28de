# %% [markdown]
# # LoRA
#
# In LoRA (here with `peft`), dropout sits in front of the low-rank adapters, and the base model is frozen.
# What does `lora_dropout` do? To run without a download, the notebook first trains a tiny GPT-2 on one language and then
# adapts it to another. The "languages" are Markov chains.

# %%
import matplotlib.pyplot as plt
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import undrop


def text(seed, rows, length=24, words=32):
    """Sequences of a Markov chain: each word is followed by one of four others."""
    draw = torch.Generator().manual_seed(seed)
    following = torch.randint(words, (words, 4), generator=draw)
    now, sequences = torch.randint(words, (rows,), generator=draw), []
    for _ in range(length):
        sequences.append(now)
        now = following[now, torch.randint(4, (rows,), generator=draw)]
    return torch.stack(sequences, 1)


def next_token(output, tokens):
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def fit(model, tokens, objective, steps, rate):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = tokens[torch.randint(len(tokens), (16,), generator=draw)]
        objective(model, {"input_ids": batch}, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# %% [markdown]
# The base model learns the first language, without dropout.

# %%
torch.manual_seed(0)
sizes = {"n_layer": 2, "n_head": 2, "n_embd": 48, "vocab_size": 32, "n_positions": 24}
off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
config = GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0)
base = GPT2LMHeadModel(config)
fit(base, text(1, 256), undrop.NoRegularization(loss=next_token), steps=150, rate=3e-3)
state = {name: value.clone() for name, value in base.state_dict().items()}

# %% [markdown]
# Now add LoRA adapters with dropout, for the second language. The only sites are those of the adapters.

# %%
few, many = text(2, 300)[:32], text(2, 300)[32:]


def adapted(p):
    torch.manual_seed(1)
    model = GPT2LMHeadModel(config)
    model.load_state_dict(state)
    lora = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=p,
        target_modules=["c_attn", "c_fc"],
        fan_in_fan_out=True,
    )
    return get_peft_model(model, lora).train()


print(undrop.sites(adapted(0.1), {"input_ids": few[:1]}))

# %% [markdown]
# A new adapter adds nothing to the model (its second matrix starts at zero), so its dropout has no effect at
# first. The dropout begins to matter as the adapter learns. Train with dropout and with `Analytic`, and compare the loss on
# the text seen in training with the loss on new text.

# %%
rates = (0.05, 0.2, 0.5)
objectives = {"dropout": undrop.Dropout, "Analytic": undrop.Analytic}
losses = {title: [] for title in objectives}
for p in rates:
    for title, objective in objectives.items():
        model = fit(adapted(p), few, objective(loss=next_token), steps=120, rate=5e-3).eval()
        with torch.no_grad():
            seen, new = (float(next_token(model(input_ids=t).logits, t)) for t in (few, many))
        losses[title].append((seen, new))
        print(f"{title:8} lora_dropout={p:<4}  seen {seen:.3f}  new {new:.3f}")

# %%
figure, axes = plt.subplots(figsize=(6, 3.6))
for (title, values), color in zip(losses.items(), ("tab:blue", "tab:orange"), strict=True):
    axes.plot(rates, [new for _, new in values], "o-", color=color, label=f"{title}, new text")
    axes.plot(rates, [seen for seen, _ in values], "s:", color=color, label=f"{title}, seen text")
axes.set(xlabel="lora_dropout", ylabel="loss per token")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# With a larger `lora_dropout` the model fits the seen text less closely, and the loss on new text falls by up to about
# 0.2. `Analytic` is better than dropout at every rate. This is one seed of a toy task.
