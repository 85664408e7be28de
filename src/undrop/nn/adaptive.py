"""Words in clusters of decreasing frequency: the adaptive softmax, tied to its embedding.

The vocabulary is sorted by frequency and cut into a shortlist S and tails C_1 … C_n, and

    p(w | h) = softmax_{S ∪ {1 … n}}(h)_w                               for w in S,
    p(w | h) = softmax_{S ∪ {1 … n}}(h)_c · softmax_{C_c}(P_c h)_w      for w in C_c

(Grave et al. 2017), as in ``torch.nn.AdaptiveLogSoftmaxWithLoss``. With tied weights,
each softmax uses the rows and the projections P_c of the embedding (Baevski & Auli 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from undrop.errors import OptionError
from undrop.kernels.adaptive import Layer
from undrop.losses import AdaptiveSoftmax, Loss
from undrop.options import check_increasing, check_int


class AdaptiveEmbedding(nn.Module):
    """One table of rows per cluster: the embedding of word w of cluster c is ``E_c[w] P_c``.

    The rows of cluster c have ``size // shrink**c`` entries; without shrinking there are no P. The
    first table ends with one row per tail, which no token looks up: a tied head uses these rows to
    choose the tail. They are in the first table because the head's matrix must be one parameter.

    Args:
        vocab_size: the number of words, sorted by decreasing frequency.
        size: the number of features d.
        cutoffs: the first word of each tail.
        shrink: the factor by which rows are shorter in each tail than in the cluster before it.
        std: the standard deviation of the initial rows.
    """

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        cutoffs: Sequence[int],
        shrink: int = 1,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.num_embeddings = check_int("vocab_size", vocab_size)
        self.cutoffs = check_increasing("cutoffs", cutoffs, below=vocab_size)
        tails = len(self.cutoffs)
        widths = [
            check_int("size", size) // check_int("shrink", shrink) ** c for c in range(tails + 1)
        ]
        if widths[-1] == 0:
            raise OptionError(
                f"shrink = {shrink} leaves none of {size} features for tail {tails}: use a smaller one."
            )
        counts = [b - a for a, b in pairwise((0, *self.cutoffs, vocab_size))]
        counts[0] += tails
        self.tables = nn.ModuleList(map(nn.Embedding, counts, widths))
        self.projections = nn.ParameterList(
            torch.empty(width, size) for width in (widths[1:] if shrink > 1 else ())
        )
        for weight in self.weights():
            nn.init.normal_(weight, std=std)
        for projection in self.projections:
            nn.init.normal_(projection, std=size**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens (…) as (…, d).

        Every table looks up all tokens, and the result has the rows of the right table for each token.
        So no shape depends on the data.
        """
        embedded: Tensor = self.tables[0](tokens.clamp(max=self.cutoffs[0] - 1))
        # The last table has no upper bound, so a token beyond the vocabulary raises an error.
        last_words = [*(end - 1 for end in self.cutoffs[1:]), None]
        for tail, (start, last_word) in enumerate(zip(self.cutoffs, last_words, strict=True)):
            rows = self.tables[tail + 1](tokens.clamp(start, last_word) - start)
            projection = self.projection(tail)
            rows = rows if projection is None else rows @ projection
            embedded = torch.where((tokens >= start).unsqueeze(-1), rows, embedded)
        return embedded

    def weights(self) -> list[Tensor]:
        """Return the rows (n_c, d_c) of each cluster; the first table ends with one row per tail."""
        return [table.get_parameter("weight") for table in self.tables]

    def projection(self, tail: int) -> Tensor | None:
        """Return P_c (d_c, d) of a tail, or None for the identity."""
        return self.projections[tail] if len(self.projections) else None


class AdaptiveHead(nn.Module):
    """The adaptive softmax over the rows of an embedding; the head itself has only the biases.

    Each call takes the embedding as an argument, so every parameter has one owner and one name in
    ``state_dict``.

    Args:
        vocab_size: the number of words, sorted by decreasing frequency.
        cutoffs: the first word of each tail.
    """

    def __init__(self, vocab_size: int, *, cutoffs: Sequence[int]) -> None:
        super().__init__()
        self.cutoffs = check_increasing(
            "cutoffs", cutoffs, below=check_int("vocab_size", vocab_size)
        )
        counts = [b - a for a, b in pairwise((0, *self.cutoffs, vocab_size))]
        counts[0] += len(self.cutoffs)
        self.biases = nn.ParameterList(torch.zeros(count) for count in counts)

    def forward(self, features: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Return the log-probabilities (…, V) for features (…, d); they can serve as logits."""
        log_p, *log_p_within = (
            layer.logits(features).log_softmax(-1) for layer in self._layers(embedding)
        )
        shortlist, *log_p_tails = log_p.split([self.cutoffs[0], *(1 for _ in log_p_within)], -1)
        tails = (a + b for a, b in zip(log_p_tails, log_p_within, strict=True))
        return torch.cat([shortlist, *tails], -1)

    def loss(self, embedding: AdaptiveEmbedding) -> Loss:
        """Return the cross-entropy loss on the features that this head takes."""
        head, *tails = self._layers(embedding)
        return AdaptiveSoftmax(head.weight, head.bias, tails=tails, cutoffs=list(self.cutoffs))

    def _layers(self, embedding: AdaptiveEmbedding) -> list[Layer]:
        """Return the layer of the shortlist's softmax, then that of each tail."""
        projections = [None, *(embedding.projection(tail) for tail in range(len(self.cutoffs)))]
        parameters = zip(projections, embedding.weights(), self.biases, strict=True)
        return [Layer(*layer) for layer in parameters]
