# %% [markdown]
# # A ConvNet with stochastic depth
#
# Stochastic depth (also called drop path) drops whole residual branches at random, separately for each example. It is
# dropout with a mask that all entries of one example share. `structured_dropout` declares this mask, so undrop finds it,
# measures it and can replace it like any other dropout.

# %%
import textwrap

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import undrop
from undrop.noise import structured_dropout

images, labels = (torch.tensor(column) for column in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:150], order[150:]


class Block(nn.Module):
    """A residual block that is skipped with probability p in training, per example."""

    def __init__(self, width, p):
        super().__init__()
        self.p = p
        self.branch = nn.Sequential(
            *(nn.GroupNorm(4, width), nn.GELU()),
            nn.Conv2d(width, width, 3, padding=1),
            *(nn.GroupNorm(4, width), nn.GELU()),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, h):
        kept = structured_dropout(
            self.branch(h),
            self.p,
            shared=(1, 2, 3),
            training=self.training,
            kind="drop path",
            mask="per example",
        )
        return h + kept


def network(depth=4, width=16, deepest=0.4):
    """p rises with depth, as in the paper that introduced stochastic depth."""
    blocks = [Block(width, deepest * (i + 1) / depth) for i in range(depth)]
    stem, head = nn.Conv2d(1, width, 3, padding=1), nn.Linear(width, 10)
    return nn.Sequential(stem, *blocks, nn.AvgPool2d(8), nn.Flatten(), head)


print(undrop.sites(network(), images[:2]))


# %%
def fit(objective, seed, steps=120):
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = train[torch.randint(len(train), (32,))]
        objective(model, images[batch], labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_loss(model):
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model.eval()(images[test]), labels[test]))


objectives = {
    "every block always on": undrop.NoRegularization,
    "stochastic depth": undrop.Dropout,
    "Analytic": lambda: undrop.Analytic(strength=undrop.TAYLOR),
}
models = {title: fit(objective(), seed=0) for title, objective in objectives.items()}
for title, model in models.items():
    print(f"{title:22} test loss {test_loss(model):.3f}")

# %% [markdown]
# Dropping a whole branch is a large change. How much of its effect does the second-order term ½E[uᵀHu] explain? The
# diagnosis measures this at each block of the network that was trained with stochastic depth.

# %%
model = models["stochastic depth"].train()
batches = [(images[rows], labels[rows]) for rows in train.split(15)]
diagnosis = undrop.diagnose(model, batches, seconds=15, implicit=False)
print(textwrap.fill(diagnosis.conclusion, 100))

# %%
effects = diagnosis.explicit.sites
figure, axes = plt.subplots(figsize=(6, 3.4))
for shift, title, values in (
    (-0.2, "R_drop of this block alone", [effect.parts.r_drop for effect in effects.values()]),
    (0.2, "½E[uᵀHu]", [effect.parts.half_quadratic for effect in effects.values()]),
):
    places = [number + shift for number in range(len(values))]
    axes.bar(places, [value.value for value in values], 0.4, label=title)
axes.set_xticks(
    range(len(effects)), [f"{name}\np = {effect.p:.1f}" for name, effect in effects.items()]
)
axes.set(xlabel="block", ylabel="added to the loss (nats)")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# The second-order term explains most of the effect of the last block, and almost nothing of the effect of the first block,
# although the first block has the smallest p. Without the first block, all later blocks get features that they were not
# trained on. So `Analytic` is a different regularizer here, and its test loss lies between the other two.
