# %% [markdown]
# # What does my dropout do?
#
# This notebook trains a small network on scikit-learn's 8×8 digits, with dropout at three places. It asks undrop what
# each dropout does, and then tests the answer: it trains again with one of them removed.

# %%
import textwrap

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import undrop

torch.manual_seed(0)
images, labels = (torch.tensor(column) for column in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images))
train, validation, test = order[:300], order[300:600], order[600:]


def network():
    return nn.Sequential(
        nn.Dropout(0.2),
        *(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(128, 10),
    )


# %% [markdown]
# `undrop.sites` runs the model once and lists every dropout that runs.

# %%
print(undrop.sites(network(), images[:1]))

# %% [markdown]
# Train as usual. `undrop.Dropout()` is plain dropout, bit for bit.


# %%
def fit(objective, seed=0, steps=300, off=()):
    torch.manual_seed(seed)
    model = network()
    for number in off:
        model[number].p = 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = train[torch.randint(len(train), (50,))]
        objective(model, images[batch], labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_loss(model):
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(images[test]), labels[test]))


model = fit(undrop.Dropout())
print(f"test loss {test_loss(model):.3f}")

# %% [markdown]
# Now run the diagnosis, which does not change the model. On batches of the training data it measures how *strong*
# dropout is at each site. On validation data it estimates whether dropout *helps* there. The benefit of a site is the
# validation loss after 20 more steps without it, minus the validation loss after 20 more steps with it.

# %%
model.train()
batches, held_out = (
    [(images[rows], labels[rows]) for rows in part.split(50)] for part in (train, validation)
)
diagnosis = undrop.diagnose(
    model, batches, validation=held_out, learning_rate=1e-3, seconds=60, draws=60
)
print(textwrap.fill(diagnosis.conclusion, 90))

# %% [markdown]
# `print(diagnosis)` shows everything, and a notebook shows it as tables if `diagnosis` is the last line of a cell.
# Here are the first two of its tables. A share says how strong a dropout is, and a benefit says whether it helps.

# %%
for table in list(diagnosis.tables())[:2]:
    print(table.text(90), end="\n\n")

# %% [markdown]
# The direct test is to train again with one site switched off.

# %%
seeds = range(3)
everywhere = (0, 3, 6)
runs = {"all three": (), **{f"without {site}": (site,) for site in everywhere}}
losses = {
    title: [test_loss(fit(undrop.Dropout(), seed, off=off)) for seed in seeds]
    for title, off in runs.items()
}
losses["none at all"] = [test_loss(fit(undrop.NoRegularization(), seed)) for seed in seeds]

figure, axes = plt.subplots(figsize=(6, 3))
for row, values in enumerate(losses.values()):
    axes.plot(values, [row] * len(values), "o", color="tab:blue", alpha=0.6)
    axes.plot(sum(values) / len(values), row, "|", color="black", markersize=18)
axes.set_yticks(range(len(losses)), losses)
axes.invert_yaxis()
axes.set_xlabel("test loss of three seeds (dots) and their mean (bar); lower is better")
figure.tight_layout()
plt.show()

# %% [markdown]
# The test agrees with the negative benefit: in a run this short, dropout slows learning down more than it protects
# against overfitting. Removing the site with the largest share lowers the loss the most, so a strong effect is not the same
# as a useful one.
