# %% [markdown]
# # Your own site and your own loss
#
# undrop knows the dropouts and losses of torch. This notebook adds one of each: a dropout that drops
# neighboring features together, and the loss of Poisson regression. Each takes a few lines.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import undrop
from undrop.noise import structured_dropout

# %% [markdown]
# **A site.** Compute your dropout with `structured_dropout`, and pass the dimensions along which entries share one mask
# value. undrop then finds it, names it and handles it like any other dropout.


# %%
class GroupDropout(nn.Module):
    """Drops groups of `size` neighboring features together."""

    def __init__(self, p, size):
        super().__init__()
        self.p, self.size = p, size

    def forward(self, h):  # (batch, features)
        groups = h.unflatten(-1, (-1, self.size))  # (batch, groups, size)
        kept = structured_dropout(
            groups, self.p, shared=(2,), training=self.training, kind="group", mask="per group"
        )
        return kept.flatten(-2)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 64), nn.Tanh(), GroupDropout(0.3, 8), nn.Linear(64, 1))


x = torch.randn(400, 10, generator=torch.Generator().manual_seed(0))
print(undrop.sites(network(), x[:2]))

# %% [markdown]
# **A loss.** Any function that returns a mean works: torch differentiates it twice. For counts y and log rates F,
# the loss is exp(F) - y·F.


# %%
def poisson(output, counts):
    return (output.squeeze(-1).exp() - counts * output.squeeze(-1)).mean()


rates = torch.exp(0.8 * x[:, 0] + 0.5 * torch.sin(2 * x[:, 1]))
counts = torch.poisson(rates, generator=torch.Generator().manual_seed(1))
step = undrop.Analytic(loss=poisson)(network(), x[:64], counts[:64])
print({name: round(float(value), 4) for name, value in step.parts.items()})

# %% [markdown]
# Is the explicit part right? `undrop.check` compares it with brute force on your batch: the mean of many losses with
# dropout, minus the loss without dropout. With Taylor's strength the two agree to second order.

# %%
objective = undrop.Analytic(loss=poisson, strength=undrop.TAYLOR)
print(undrop.check(objective, network(), (x[:64], counts[:64]), seconds=3))

# %% [markdown]
# Then train on 60 examples, and compute the loss on the others.


# %%
def fit(objective, steps=250):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    curve = []
    for number in range(steps):
        objective(model, x[:60], counts[:60]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 10 == 9:
            with torch.no_grad():
                curve.append(float(poisson(model.eval()(x[60:]), counts[60:])))
            model.train()
    return curve


figure, axes = plt.subplots(figsize=(6, 3.6))
for title, kind, style in (
    ("no regularization", undrop.NoRegularization, "-"),
    ("group dropout", undrop.Dropout, "--"),
    ("Analytic", undrop.Analytic, "-."),
):
    curve = fit(kind(loss=poisson))
    axes.plot(range(10, 10 * len(curve) + 1, 10), curve, style, label=title)
axes.set(xlabel="step", ylabel="test loss")
axes.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# On 60 examples the network overfits without regularization. Group dropout and `Analytic` both prevent most of the
# overfitting.
