# %% [markdown]
# # Replace dropout in five lines
#
# The training loop below is an ordinary one. Only the line that computes the loss uses undrop.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import undrop

images, labels = (torch.tensor(column) for column in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:150], order[150:]
wrong = train[:30]  # a fifth of the training labels is wrong, so that there is something to overfit
labels[wrong] = (labels[wrong] + 1) % 10


def network():
    return nn.Sequential(
        *(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.4)),
        *(nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.4)),
        nn.Linear(128, 10),
    )


# %% [markdown]
# The five lines are the first five of the training loop.


# %%
def losses(objective, seed, steps=300, every=20):
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    curve = []
    for number in range(steps):
        batch = train[torch.randint(len(train), (40,))]

        step = objective(model, images[batch], labels[batch])
        step.backward()
        optimizer.step()
        optimizer.zero_grad()

        if number % every == every - 1:
            with torch.no_grad():
                output = model.eval()(images[test])
                curve.append(float(nn.functional.cross_entropy(output, labels[test])))
            model.train()
    return torch.tensor(curve), step.parts


# %% [markdown]
# Train with four objectives, on three seeds each. `Analytic` with `strength=undrop.TAYLOR` matches dropout's expected
# loss to second order. The default strength is the paper's, twice as large.

# %%
objectives = {
    "no regularization": undrop.NoRegularization,
    "dropout": undrop.Dropout,
    "Analytic": undrop.Analytic,
    "Analytic, Taylor's strength": lambda: undrop.Analytic(strength=undrop.TAYLOR),
}
curves, parts = {}, {}
for title, objective in objectives.items():
    runs = [losses(objective(), seed) for seed in range(3)]
    curves[title] = torch.stack([curve for curve, _ in runs])
    parts[title] = runs[0][1]

for title, values in parts.items():
    print(f"{title:28}", {name: round(float(value), 3) for name, value in values.items()})

# %% [markdown]
# These are the parts of the last step. They add up to its total. The implicit part is noise with mean zero, so its
# value says nothing; only its gradient matters. The figure shows the mean test loss during training, with a band from the
# lowest to the highest of the three seeds.

# %%
figure, axes = plt.subplots(figsize=(6, 4))
steps = torch.arange(20, 301, 20)
for (title, values), style in zip(curves.items(), ("-", "--", "-.", ":"), strict=True):
    (line,) = axes.plot(steps, values.mean(0), style, label=title)
    axes.fill_between(steps, values.amin(0), values.amax(0), color=line.get_color(), alpha=0.15)
axes.set(xlabel="step", ylabel="test loss", ylim=(0.5, 1.5))
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Without regularization the network learns the wrong labels too, and its test loss climbs. Dropout and `Analytic` slow
# that down, about equally well here.
