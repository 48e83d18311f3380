"""Drafting and accepting at temperature leave the target's own distribution."""

import numpy as np
import pytest
from oracle.formats import bf16_bits
from oracle.run import run

VOCAB, DRAFTS, TRIALS, BATCH = 8, 2, 20000, 500


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def chi_square(counts, probability):
    expected = probability * counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


# Upper 0.001 quantile of chi-square with 7 degrees of freedom.
LIMIT = 24.32


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_draft_and_accept_reproduce_the_target(temperature):
    """Token by token: the first emitted token must follow the target's row 0, and where the first
    draft was accepted, the second must follow the target's row for that first token.

    Planted, one at a time: a draw from p after a rejection, a coin that is not scaled by q, a
    temperature left out. The first statistic is then 3000 to 6400; as it is, the four are below 9.
    """
    rng = np.random.default_rng(11)
    target = (rng.standard_normal((VOCAB + 1, VOCAB)) * 1.5).astype(np.float32)
    base = (rng.standard_normal((DRAFTS, VOCAB))).astype(np.float32)
    w1, w2 = bf16_bits(rng.standard_normal((VOCAB, 4))), bf16_bits(rng.standard_normal((VOCAB, 4)))
    anchor = 3
    first = np.zeros(VOCAB, np.int64)
    second = np.zeros((VOCAB, VOCAB), np.int64)
    for _ in range(TRIALS // BATCH):
        uniform = rng.uniform(2**-30, 1 - 2**-24, (BATCH, DRAFTS, VOCAB)).astype(np.float32)
        uniform = np.clip(uniform, np.float32(2**-30), np.nextafter(np.float32(1), np.float32(0)))
        temp = np.full(BATCH, temperature, np.float32)
        drafted = run(
            "markov_draft",
            "scalar",
            {
                "base": np.broadcast_to(base, (BATCH, DRAFTS, VOCAB)).copy(),
                "w1": w1,
                "w2": w2,
                "anchor": np.full(BATCH, anchor, np.int64),
                "temp": temp,
                "uniform": uniform,
            },
        )
        tokens = drafted["tokens"]
        # The target is a Markov chain: row 0 follows the anchor, row i follows draft i.
        rows = np.concatenate([np.full((BATCH, 1), VOCAB), tokens], axis=1)
        coins = rng.uniform(0, 1, (BATCH, DRAFTS + 1)).astype(np.float32)
        coins = np.minimum(coins, np.nextafter(np.float32(1), np.float32(0)))
        out = run(
            "accept",
            "scalar",
            {
                "draft": tokens,
                "target_logits": target[rows],
                "draft_logits": drafted["logits"],
                "temp": temp,
                "coins": coins,
            },
        )
        for b in range(BATCH):
            emitted = [*tokens[b, : out["accepted"][b]], out["next"][b]]
            first[emitted[0]] += 1
            if len(emitted) > 1:
                second[emitted[0], emitted[1]] += 1
    assert chi_square(first, softmax(target[VOCAB] / np.float64(temperature))) < LIMIT
    checked = 0
    for token in range(VOCAB):
        if second[token].sum() > 500:
            checked += 1
            want = softmax(target[token] / np.float64(temperature))
            assert chi_square(second[token], want) < LIMIT, f"after {token}"
    assert checked >= 3
