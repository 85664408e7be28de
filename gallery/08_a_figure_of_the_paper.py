# %% [markdown]
# # A figure of the paper
#
# Figure 1 of the paper shows that averaging dropout over k masks makes the result worse, although the expected objective
# stays the same. Figure 2 shows that adding the missing noise back restores the result. Here the noise is the difference of
# two masks' gradients (Section 3.1).
#
# The command `undrop reproduce averaging-noise noise-put-back --scale small --seeds 5` trains these methods on 10,000
# tokens of Penn Treebank. That takes a while, so this notebook reads the records that come with the repository. The
# network and the text are far smaller than the paper's, so only the comparison between methods is meaningful.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt

from undrop.lab.reproduce.tables import experiment

here = Path(__file__).parent if "__file__" in globals() else Path.cwd()
records = [
    json.loads(path.read_text(encoding="utf-8"))
    for path in (here.parent / "results" / "small" / "records").glob("*.json")
]
for claim in experiment("averaging-noise").claims:
    print("-", claim.sentence)

# %% [markdown]
# Each record holds the whole configuration of a run and its curve. Select the runs of a method, one per seed:


# %%
def curves(**objective):
    """The validation curve of each seed, for runs on 10,000 tokens with the default drop probability."""
    curve_of_seed = {}
    for record in records:
        config = record["config"]
        if (
            config["data"]["name"] == "ptb"
            and config["data"]["limit_tokens"] == 10_000
            and config["model"].get("input_dropout") == 0.4
            and config["schedule"]["name"] == "constant"
            and not record["probe"]
            and all(config["objective"].get(name) == value for name, value in objective.items())
        ):
            curve_of_seed[record["seed"]] = record["curve"]["valid_ppl"]
    return list(curve_of_seed.values())


averaged = {f"Drop{k}": curves(name="dropout", k=k, noise=None) for k in (1, 2, 4, 8, 32)}
restored = {"Drop4": averaged["Drop4"]}
restored["Drop4 + noise"] = curves(name="dropout", k=4, noise="resampled")
for title, runs in {**averaged, **restored}.items():
    best = [min(curve) for curve in runs]
    print(f"{title:14} best validation perplexity {sum(best) / len(best):.2f}  ({len(runs)} seeds)")

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(6, 7), sharex=True)
for axes, group, title in (
    (above, averaged, "averaging over k masks"),
    (below, {"Drop1": averaged["Drop1"], **restored}, "with the missing noise added back"),
):
    for (name, runs), style in zip(
        group.items(), ("-", "--", "-.", ":", (0, (1, 3))), strict=False
    ):
        mean = [sum(column) / len(column) for column in zip(*runs, strict=True)]
        axes.plot(range(1, len(mean) + 1), mean, linestyle=style, label=name)
    axes.set(ylabel="validation perplexity", title=title, xlim=(5, 25), ylim=(43, 60))
    axes.legend()
below.set(xlabel="epoch", xticks=range(5, 26, 5))
figure.tight_layout()
plt.show()

# %% [markdown]
# After epoch 15 the curves separate: more masks give a higher perplexity. With the noise added back, Drop4 is as good as
# plain dropout. All of these methods minimize the same expected loss, so the difference is the implicit effect.
