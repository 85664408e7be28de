"""The adaptive softmax against torch's own module, and against the embedding that it is tied to."""

import pytest
import torch

from undrop.errors import OptionError
from undrop.nn import AdaptiveEmbedding, AdaptiveHead

VOCABULARY, SIZE, CUTOFFS = 40, 8, (10, 25)


def pair(shrink=1):
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(VOCABULARY, SIZE, cutoffs=CUTOFFS, shrink=shrink, std=1.0)
    head = AdaptiveHead(VOCABULARY, cutoffs=CUTOFFS)
    for bias in head.biases:
        torch.nn.init.normal_(bias)
    return embedding.double(), head.double()


def torchs_module(embedding, head):
    """torch's adaptive softmax with the same numbers; its tails have no biases."""
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(
        SIZE, VOCABULARY, list(CUTOFFS), div_value=2.0, head_bias=True
    ).double()
    with torch.no_grad():
        theirs.head.weight.copy_(embedding.weights()[0])
        theirs.head.bias.copy_(head.biases[0])
        for i, (down, up) in enumerate(theirs.tail):
            down.weight.copy_(embedding.projections[i])
            up.weight.copy_(embedding.weights()[i + 1])
            head.biases[i + 1].zero_()
    return theirs


def test_the_adaptive_head_equals_torchs_with_the_rows_of_the_embedding():
    embedding, head = pair(shrink=2)
    theirs = torchs_module(embedding, head)
    features = torch.randn(7, SIZE, dtype=torch.double)
    torch.testing.assert_close(head(features, embedding), theirs.log_prob(features))


@pytest.mark.parametrize("shrink", [1, 2])
def test_the_probabilities_of_the_adaptive_head_sum_to_one(shrink):
    embedding, head = pair(shrink)
    features = torch.randn(3, 4, SIZE, dtype=torch.double)
    total = head(features, embedding).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize("shrink", [1, 2])
def test_the_embedding_of_a_word_is_its_row(shrink):
    embedding, _ = pair(shrink)
    rows = []
    for start, end, c in ((0, 10, 0), (10, 25, 1), (25, 40, 2)):
        cluster = embedding.weights()[c][: end - start]
        projection = embedding.projection(c - 1) if c else None
        rows.append(cluster if projection is None else cluster @ projection)
    tokens = torch.randperm(VOCABULARY).view(5, 8)
    torch.testing.assert_close(embedding(tokens), torch.cat(rows)[tokens])


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_outside_the_vocabulary_is_an_error(token):
    with pytest.raises(IndexError, match="out of range"):
        pair()[0](torch.tensor([0, token]))


def test_the_logits_of_a_tail_are_products_with_the_embeddings_of_its_words():
    """The embedding of a word is E_c[w] P_c, and its logit is E_c[w] P_c h plus the bias."""
    embedding, head = pair(shrink=2)
    words = torch.arange(25, 40)
    features = torch.randn(SIZE, dtype=torch.double)
    scores = embedding(words) @ features + head.biases[2]
    log_prob = head(features, embedding)[25:]
    torch.testing.assert_close(log_prob.log_softmax(-1), scores.log_softmax(-1))


def test_rows_shrink_and_the_first_table_has_a_row_for_each_tail():
    embedding, head = pair(shrink=2)
    assert [tuple(w.shape) for w in embedding.weights()] == [(12, 8), (15, 4), (15, 2)]
    assert [tuple(p.shape) for p in embedding.projections] == [(4, 8), (2, 8)]
    assert [len(b) for b in head.biases] == [12, 15, 15]
    assert len(pair()[0].projections) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cutoffs": [0, 5]}, r"cutoffs must be .* from 1 to 39, got \[0, 5\]"),
        ({"cutoffs": [5, 5]}, r"got \[5, 5\]"),
        ({"cutoffs": [5, 40]}, r"got \[5, 40\]"),
        ({"cutoffs": [2.5]}, r"got \[2\.5\]"),
        ({"cutoffs": [5], "shrink": 0}, "shrink must be a whole number of at least 1, got 0"),
        ({"cutoffs": [5, 9], "shrink": 3}, "shrink = 3 leaves none of 8 features for tail 2"),
    ],
)
def test_the_adaptive_embedding_refuses_options_that_do_not_fit(options, message):
    with pytest.raises(OptionError, match=message):
        AdaptiveEmbedding(VOCABULARY, SIZE, **options)
