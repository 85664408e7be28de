"""GPT: a plain causal transformer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from undrop.errors import OptionError
from undrop.lab.models.language import MODELS, LanguageModel, State
from undrop.options import check_int, check_probability


class _Attention(nn.Module):
    """Causal self-attention with torch's fused kernel, which also drops attention probabilities."""

    def __init__(self, size: int, heads: int, *, p: float, attention_p: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_p
        self.query_key_value = nn.Linear(size, 3 * size)
        self.output = nn.Linear(size, size)
        self.output_dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # (T, B, 3, H, d)
        query, key, value = packed.permute(2, 1, 3, 0, 4).unbind()  # (B, H, T, d) each
        # The function does not know the module's mode, and would also drop in eval mode.
        p = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        x = self.output_dropout(self.output(mixed.permute(2, 0, 1, 3).flatten(2)))
        return x


class _FeedForward(nn.Module):
    def __init__(self, size: int, *, p: float) -> None:
        super().__init__()
        self.inner = nn.Linear(size, 4 * size)
        self.output = nn.Linear(4 * size, size)
        self.output_dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = self.output_dropout(self.output(F.gelu(self.inner(x))))
        return x


class _Layer(nn.Module):
    def __init__(self, size: int, heads: int, *, p: float, attention_p: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size)
        self.attention = _Attention(size, heads, p=p, attention_p=attention_p)
        self.feedforward_norm = nn.LayerNorm(size)
        self.feedforward = _FeedForward(size, p=p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.feedforward(self.feedforward_norm(x))
        return x


@MODELS.register("gpt", about="A causal transformer like GPT-2 (Radford et al. 2019)")
class GPT(LanguageModel):
    """A causal transformer with learned positions and a norm before each block.

    Radford et al. 2019, "Language models are unsupervised multitask learners". The defaults are the
    smallest GPT-2. The head uses the embedding's matrix. The model carries nothing from window to
    window: its state is ``()``.

    Args:
        vocab_size: the number of words.
        size: the number of features d.
        layers: the number of layers.
        heads: the number of attention heads, which divides the size.
        context: the largest number of tokens in a window.
        dropout: the probability of dropping a feature of an embedded word or of a block's output.
        attention_dropout: the probability of dropping an attention probability.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        size: int = 768,
        layers: int = 12,
        heads: int = 12,
        context: int = 1024,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
    ) -> None:
        super().__init__(vocab_size, check_int("size", size), bias=False)
        if size % check_int("heads", heads):
            raise OptionError(f"heads must divide size={size}, got {heads}.")
        p = check_probability("dropout", dropout)
        attention_p = check_probability("attention_dropout", attention_dropout)
        self.embedding = nn.Embedding(vocab_size, size)
        self.context = check_int("context", context)
        self.positions = nn.Embedding(context, size)
        self.input_dropout = nn.Dropout(p)
        self.layers = nn.ModuleList(
            _Layer(size, heads, p=p, attention_p=attention_p)
            for _ in range(check_int("layers", layers))
        )
        self.norm = nn.LayerNorm(size)
        self._initialize()

    def features(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the normalized outputs of the last layer, and the empty state."""
        steps, context = len(tokens), self.positions.num_embeddings
        if steps > context:
            raise OptionError(
                f"tokens must be at most {context} steps long, the model's context, got {steps}."
            )
        x = self.input_dropout(self.embedding(tokens) + self.positions.weight[:steps, None])
        for layer in self.layers:
            x = layer(x)
        return self.norm(x), ()

    def _initialize(self) -> None:
        """Draw normal weights with a standard deviation of 0.02.

        The blocks add 2 · layers outputs to the residual stream. The weights of these outputs have a
        standard deviation of 0.02 / sqrt(2 · layers), so that their sum does not grow with the layers.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, _Attention | _FeedForward):
                nn.init.normal_(module.output.weight, std=0.02 / (2 * len(self.layers)) ** 0.5)
