# %% [markdown]
# # Choosing p with the tuner
#
# How large should each p be? The usual answer is a grid of training runs. `undrop.Tuner` adjusts p of every site
# within one run: every 100 steps it trains two branches for ten steps, one with more noise and one with less,
# compares their validation losses, and moves p towards the better one.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import undrop

images, labels = (torch.tensor(column) for column in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, validation, test = order[:200], order[200:400], order[400:]
wrong = train[:40]  # a fifth of the training labels is wrong, so that there is something to overfit
labels[wrong] = (labels[wrong] + 1) % 10


def network(p):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Dropout(p), nn.Linear(64, 128), nn.ReLU()),
        *(nn.Dropout(p), nn.Linear(128, 128), nn.ReLU()),
        *(nn.Dropout(p), nn.Linear(128, 10)),
    )


def fit(model, objective, steps=400):
    """Train, and return the test loss along the way."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(1)
    curve = []
    for number in range(steps):
        batch = train[torch.randint(len(train), (50,), generator=draw)]
        objective(model, images[batch], labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 20 == 19:
            with torch.no_grad():
                output = model.eval()(images[test])
                curve.append(float(nn.functional.cross_entropy(output, labels[test])))
            model.train()
    return curve


# %% [markdown]
# First train a grid, one run for each p. Then train once with the tuner. Its validation batches are not part of the
# training data.

# %%
grid = {p: fit(network(p), undrop.Dropout()) for p in (0.05, 0.2, 0.4, 0.6)}
held_out = [(images[rows], labels[rows]) for rows in validation.split(50)]
tuner = undrop.Tuner(undrop.Dropout(), held_out)
tuned = fit(network(0.2), tuner.step)

for p, curve in grid.items():
    print(
        f"p = {p:<4} at every site   lowest test loss {min(curve):.3f}, at the end {curve[-1]:.3f}"
    )
chosen = ", ".join(f"{p:.2f}" for p in tuner.probabilities.values())
print(f"tuned, p ends at {chosen}   lowest {min(tuned):.3f}, at the end {tuned[-1]:.3f}")

# %% [markdown]
# The table shows the state of each site at the end: its p, and whether more dropout would help.

# %%
print(tuner.table().text())

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(6, 7), sharex=True)
for name, style in zip(tuner.probabilities, ("-", "--", ":"), strict=True):
    above.plot(*tuner.history.path(name), linestyle=style, label=f"site {name}")
above.set(ylabel="p", ylim=(0, None), title="p of every site during the run")
above.legend()
steps = range(20, 20 * len(tuned) + 1, 20)
for (p, curve), marker in zip(grid.items(), "os^v", strict=True):
    below.plot(steps, curve, color="0.6", marker=marker, markersize=4, label=f"p = {p}")
below.plot(steps, tuned, "k--", label="tuned")
below.set(xlabel="step", ylabel="test loss", ylim=(0.5, 2.0))
below.legend(loc="upper right", ncols=2)
figure.tight_layout()
plt.show()

# %% [markdown]
# This is one run on one small task. The tuner is experimental: [Tuning p](../tuning.md) compares it with searches
# on six tasks.
