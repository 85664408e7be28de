"""Transformer-XL: attention by relative position over the window and a memory of earlier windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrop.errors import OptionError
from undrop.lab.models.language import MODELS, LanguageModel, State
from undrop.nn.adaptive import AdaptiveEmbedding
from undrop.noise import structured_dropout
from undrop.options import check_int, check_probability


def sinusoids(steps: int, size: int, *, like: Tensor) -> Tensor:
    """Return encodings R_k of the distances k = steps - 1, …, 1, 0, of shape (steps, size).

    R_k = [sin(k ω), cos(k ω)] with ω_i = 10000^(-2i / size).
    """
    # Angles of up to thousands of radians need at least single precision, whatever dtype the model has.
    precise = torch.promote_types(like.dtype, torch.float32)
    distances = torch.arange(steps - 1, -1, -1, dtype=precise, device=like.device)
    exponents = torch.arange(0, size, 2, dtype=precise, device=like.device) / size
    angles = distances[:, None] * 10000.0**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :size].to(like.dtype)


def _relative_shift(scores: Tensor) -> Tensor:
    """Rearrange scores (…, T, K) whose columns are distances into scores whose columns are keys.

    Column m has distance K-1-m, and query i is at distance i + K-T - j from key j. So entry (i, j) of
    the result is scores[i, j + T-1-i]: each row moves one column less to the left than the row above.
    Adding one column and viewing the memory with other row lengths does exactly that, without
    indexing. Entries of keys after the query, j > i + K-T, have no meaning; the caller masks them.
    """
    *batch, queries, keys = scores.shape
    padded = F.pad(scores, (1, 0)).view(*batch, keys + 1, queries)
    return padded[..., 1:, :].reshape(*batch, queries, keys)


def _future_keys(scores: Tensor) -> Tensor:
    """Return a mask (T, K) that is True for the keys after each query."""
    queries, keys = scores.shape[-2:]
    ones = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    return ones.triu(keys - queries + 1)


class RelativeAttention(nn.Module):
    """Causal self-attention whose scores depend on the distance to a key instead of its position.

    Query i scores key j at distance k = i - j ≥ 0 by

        ((W_q x_i + u)ᵀ W_k x_j + (W_q x_i + v)ᵀ W_r R_k) / √d_head.

    Args:
        size: the number of features d.
        heads: the number of heads H; d_head = d / H.
        dropout: the probability of dropping a feature of the output.
        attention_dropout: the probability of dropping an attention probability.
    """

    def __init__(
        self, size: int, heads: int, *, dropout: float = 0.0, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(size, size, bias=False)
        self.key_value = nn.Linear(size, 2 * size, bias=False)
        self.position = nn.Linear(size, size, bias=False)
        self.output = nn.Linear(size, size, bias=False)
        self.attention_dropout = nn.Dropout(attention_dropout)
        self.output_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, encodings: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Attend from the window to the memory and itself.

        Args:
            x: the window (T, B, d).
            memory: the inputs of the layer at the M steps before the window (M, B, d).
            encodings: R of the distances T+M-1, …, 0, as (T+M, d).
            u: the bias of queries for content (H, d_head).
            v: the bias of queries for position (H, d_head).
        """
        query = self._split_heads(self.query(x))  # (T, B, H, d_head)
        key, value = self.key_value(torch.cat([memory, x])).chunk(2, dim=-1)
        key, value = (self._split_heads(part).permute(1, 2, 0, 3) for part in (key, value))
        position = self._split_heads(self.position(encodings)).transpose(0, 1)  # (H, T+M, d_head)
        content_scores = (query + u).permute(1, 2, 0, 3) @ key.mT  # (B, H, T, T+M)
        position_scores = (query + v).permute(1, 2, 0, 3) @ position.mT
        scores = (content_scores + _relative_shift(position_scores)) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(_future_keys(scores), float("-inf"))
        probabilities = F.softmax(scores, dim=-1)
        mixed = self.attention_dropout(probabilities) @ value
        x = self.output_dropout(self.output(mixed.permute(2, 0, 1, 3).flatten(2)))
        return x

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1)


class _FeedForward(nn.Module):
    def __init__(self, size: int, inner_size: int, *, p: float) -> None:
        super().__init__()
        self.inner = nn.Linear(size, inner_size)
        self.inner_dropout = nn.Dropout(p)
        self.output = nn.Linear(inner_size, size)
        self.output_dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner_dropout(F.relu(self.inner(x)))
        x = self.output_dropout(self.output(x))
        return x


class _Layer(nn.Module):
    def __init__(
        self, size: int, inner_size: int, heads: int, *, p: float, attention_p: float
    ) -> None:
        super().__init__()
        self.attention = RelativeAttention(size, heads, dropout=p, attention_dropout=attention_p)
        self.attention_norm = nn.LayerNorm(size)
        self.feedforward = _FeedForward(size, inner_size, p=p)
        self.feedforward_norm = nn.LayerNorm(size)

    def forward(self, x: Tensor, memory: Tensor, encodings: Tensor, u: Tensor, v: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, memory, encodings, u, v))
        x = self.feedforward_norm(x + self.feedforward(x))
        return x


class _PositionDropout(nn.Module):
    """Dropout of the position encodings, with one mask for all examples of a batch."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, encodings: Tensor) -> Tensor:
        return structured_dropout(encodings, self.p, training=self.training, kind="position")

    def extra_repr(self) -> str:
        return f"p={self.p}"


@MODELS.register(
    "transformer-xl", about="A transformer that attends to earlier windows too (Dai et al. 2019)"
)
class TransformerXL(LanguageModel):
    """A transformer that also attends to its own activations in earlier windows.

    Dai et al. 2019, "Transformer-XL: attentive language models beyond a fixed-length context". The
    defaults are the base model of that paper on WikiText-103, which needs a vocabulary of more than
    200,000 words. A norm follows each block, all layers share u and v, and the adaptive softmax uses
    the rows and projections of the adaptive embedding. With ``shrink`` > 1 (4 in the paper's large
    model), the shortlist has no projection, unlike in the paper.

    The state is one memory (M, B, d) for each layer: the inputs of the layer at the last M ≤ ``memory``
    steps. You can set ``model.memory`` to another length at any time.

    Args:
        vocab_size: the number of words, which are sorted with the most frequent first.
        size: the number of features d.
        inner_size: the number of hidden units of the feed-forward blocks.
        layers: the number of layers.
        heads: the number of attention heads, which divides the size.
        memory: the number of earlier steps to attend to.
        cutoffs: the index of the first word of each tail cluster of an adaptive softmax; empty for a
            full softmax.
        shrink: the factor by which the embeddings of a cluster are shorter than those of the cluster
            before it.
        dropout: the probability of dropping a feature of an embedded word, of a position's encoding or
            of a block's output, or a hidden unit of a feed-forward block.
        attention_dropout: the probability of dropping an attention probability.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        size: int = 410,
        inner_size: int = 2100,
        layers: int = 16,
        heads: int = 10,
        memory: int = 150,
        cutoffs: Sequence[int] = (20_000, 40_000, 200_000),
        shrink: int = 1,
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__(vocab_size, check_int("size", size), cutoffs=cutoffs)
        if size % check_int("heads", heads):
            raise OptionError(f"heads must divide size={size}, got {heads}.")
        if shrink != 1 and not cutoffs:
            raise OptionError(f"shrink must be 1 without cutoffs, got {shrink!r}.")
        p = check_probability("dropout", dropout)
        attention_p = check_probability("attention_dropout", attention_dropout)
        inner_size = check_int("inner_size", inner_size)
        self.memory = check_int("memory", memory, least=0)
        self.embedding = (
            AdaptiveEmbedding(vocab_size, size, cutoffs=cutoffs, shrink=shrink)
            if cutoffs
            else nn.Embedding(vocab_size, size)
        )
        self.input_dropout = nn.Dropout(p)
        self.position_dropout = _PositionDropout(p)
        self.content_bias = nn.Parameter(torch.empty(heads, size // heads))
        self.position_bias = nn.Parameter(torch.empty(heads, size // heads))
        self.layers = nn.ModuleList(
            _Layer(size, inner_size, heads, p=p, attention_p=attention_p)
            for _ in range(check_int("layers", layers))
        )
        self.output_dropout = nn.Dropout(p)
        self._initialize()

    def features(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the outputs of the last layer after dropout, and the new memory of each layer."""
        x = self.embedding(tokens)
        x = self.input_dropout(x * x.shape[-1] ** 0.5)
        memories = state or (x[:0],) * len(self.layers)
        encodings = sinusoids(len(memories[0]) + len(x), x.shape[-1], like=x)
        encodings = self.position_dropout(encodings)
        new_memories = []
        for layer, memory in zip(self.layers, memories, strict=True):
            new_memories.append(self._extend(memory, x))
            x = layer(x, memory, encodings, self.content_bias, self.position_bias)
        return self.output_dropout(x), tuple(new_memories)

    def _extend(self, memory: Tensor, x: Tensor) -> Tensor:
        """Return the last steps of the memory followed by x, at most ``self.memory`` of them."""
        past = torch.cat([memory, x]) if len(x) < self.memory else x
        return past[max(len(past) - self.memory, 0) :]

    def _initialize(self) -> None:
        """Draw normal weights with a standard deviation of 0.02, and set biases to 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.content_bias, std=0.02)
        nn.init.normal_(self.position_bias, std=0.02)
