"""The Markov draft and the acceptance rule."""

import numpy as np

from oracle.formats import bf, bf16_value, f32

MIN_TEMPERATURE = 1e-5


def markov_draft(a):
    return {name: value for name, value in markov_margins(a).items() if name != "near"}


def markov_margins(a, relative=0.0):
    """markov_draft's outputs, and the steps whose two best keys are within `relative` * bias."""
    base = a["base"].astype(np.float64)
    w1, w2 = bf16_value(a["w1"]), bf16_value(a["w2"])
    temp = a["temp"].astype(np.float64)
    tau = np.where(temp > 0, np.maximum(temp, MIN_TEMPERATURE), 1.0)[:, None]
    batch, num_drafts, _ = base.shape
    tokens = np.zeros((batch, num_drafts), np.int64)
    near = np.zeros((batch, num_drafts), bool)
    logits = np.zeros(base.shape, np.float32)
    prev = a["anchor"]
    for s in range(num_drafts):
        bias = bf(w1[prev] @ w2.T)
        logits[:, s] = f32(base[:, s] + bias)
        u = a["uniform"][:, s].astype(np.float64)
        noise = np.where(temp[:, None] > 0, -np.log(-np.log1p(-u)), 0.0)
        keys = logits[:, s].astype(np.float64) / tau + noise
        prev = np.argmax(keys, axis=1)
        tokens[:, s] = prev
        top = np.sort(keys, axis=1)[:, -2:]
        near[:, s] = top[:, 1] - top[:, 0] <= relative * np.abs(bias).max(1) / tau[:, 0]
    return {"tokens": tokens, "logits": logits, "near": near}


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def accept(a):
    return {name: value for name, value in accept_margins(a).items() if name != "margin"}


def accept_margins(a):
    """accept's outputs, and how far the closest comparison of each request was from the other side.

    Greedy requests compare integers: their margin is infinite.
    """
    draft = a["draft"]
    batch, num_drafts = draft.shape
    target = a["target_logits"].astype(np.float64)
    coins = a["coins"].astype(np.float64)
    temp = a["temp"].astype(np.float64)
    rows = np.arange(batch)
    greedy = temp == 0
    tau = np.maximum(temp, MIN_TEMPERATURE)[:, None, None]
    p, q = softmax(target / tau), softmax(a["draft_logits"].astype(np.float64) / tau)
    best = target.argmax(-1)
    accepted = np.zeros(batch, np.int64)
    margin = np.full(batch, np.inf)
    alive = np.ones(batch, bool)
    for i in range(num_drafts):
        p_d, q_d = p[rows, i, draft[:, i]], q[rows, i, draft[:, i]]
        sampled_ok = (q_d > 0) & (q_d <= 1) & (coins[:, i] * q_d < p_d)
        margin = np.where(alive, np.minimum(margin, np.abs(p_d - coins[:, i] * q_d)), margin)
        alive &= np.where(greedy, best[:, i] == draft[:, i], sampled_ok)
        accepted += alive
    residual = p[rows, accepted]
    rejected = accepted < num_drafts
    residual[rejected] = np.maximum(
        residual[rejected] - q[rows, accepted % num_drafts][rejected], 0
    )
    running = np.cumsum(residual, -1)
    total = running[:, -1]
    wanted = (coins[:, -1] * total)[:, None]
    exceeds = running > wanted
    margin = np.minimum(margin, np.abs(running - wanted).min(-1))
    drawn = np.where(exceeds.any(-1), exceeds.argmax(-1), target.shape[-1] - 1)
    token = np.where(greedy, best[rows, accepted], drawn)
    return {
        "accepted": accepted,
        "next": token.astype(np.int64),
        "margin": np.where(greedy, np.inf, margin),
    }
