"""Index queries, scores and selections."""

import numpy as np

from oracle.compress import finished_v4, pooled_v4
from oracle.formats import (
    bf,
    bf16_bits,
    bf16_value,
    e4m3_value,
    fp4_pack,
    fp4_round_trip_ue8m0,
    fp4_value,
    quantise_e4m3_f32,
    ue8m0_value,
)
from oracle.mix import norm
from oracle.rope_kv import ROPE_DIM, rotate

CANDIDATE_BLOCK = 8
INDEX_DIM = 128
QUERY_FLOOR = 6.0 * 2.0**-126
KEY_FLOOR = 1e-4


def hadamard(x):
    """By the Sylvester matrix of 128, orthonormal; it is its own inverse."""
    h = np.ones((1, 1))
    while len(h) < INDEX_DIM:
        h = np.block([[h, h], [h, -h]])
    return x @ h * INDEX_DIM**-0.5


def index_query(a):
    q = bf16_value(a["q"])
    q[..., -ROPE_DIM:] = bf(rotate(q[..., -ROPE_DIM:], a["pos"], yarn=True))
    return {"iq": bf16_bits(fp4_round_trip_ue8m0(q, QUERY_FLOOR)[0])}


def index_key(a):
    key = bf(bf16_value(a["latent"]) @ bf16_value(a["wk"]).T)
    key = bf(norm(key, bf16_value(a["norm"])))
    key[:, -ROPE_DIM:] = bf(rotate(key[:, -ROPE_DIM:], a["pos"], yarn=True))
    _, codes, scales = fp4_round_trip_ue8m0(key, floor=KEY_FLOOR)
    return {"rows": np.concatenate([fp4_pack(codes), scales], axis=1)}


def index_query_v4(a):
    q = bf16_value(a["q"])
    q[..., -ROPE_DIM:] = rotate(q[..., -ROPE_DIM:], a["pos"], yarn=True)
    codes, scale = quantise_e4m3_f32(hadamard(q), KEY_FLOOR)
    return {"iq": codes, "qs": scale}


def index_key_v4(a):
    x, wkv, wgate = (bf16_value(a[name]) for name in ("x", "wkv", "wgate"))
    pooled = pooled_v4(x, wkv, wgate, a["ape"].astype(np.float64), 4)
    key = hadamard(finished_v4(pooled, bf16_value(a["norm"]), 4))
    codes, scale = quantise_e4m3_f32(key, KEY_FLOOR)
    return {"rows": np.concatenate([codes, scale[:, None].view(np.uint8)], axis=1)}


def key_values(rows):
    """u8 [N,68] (V4.1) or [N,132] (V4) to float64 [N,128]."""
    if rows.shape[1] == INDEX_DIM + 4:
        scale = np.ascontiguousarray(rows[:, INDEX_DIM:]).view("<f4").astype(np.float64)
        return e4m3_value(rows[:, :INDEX_DIM]) * scale + 0.0
    # Plus 0.0: either code of zero is +0.
    return fp4_value(rows[:, :64]) * np.repeat(ue8m0_value(rows[:, 64:]), 32, axis=1) + 0.0


def index_scores(a):
    """(scores, the same sums of absolute terms), float64 [T,N]."""
    # V4's codes are e4m3 without a scale: it is folded into the weights.
    query = e4m3_value(a["iq"]) if a["iq"].dtype == np.uint8 else bf16_value(a["iq"])
    dots = np.einsum("thd,nd->thn", query, key_values(a["ik"]))
    terms = a["weights"].astype(np.float64)[:, :, None] * np.maximum(dots, 0.0)
    return terms.sum(1), np.abs(terms).sum(1)


def best_ascending(score, k):
    """The k largest of score [n] (lowest index on ties; -inf never), ascending, -1 at the end."""
    order = np.argsort(-score, kind="stable")[:k]
    order = np.sort(order[score[order] > -np.inf])
    return np.concatenate([order, np.full(k - len(order), -1)]).astype(np.int32)


def visible_scores(a):
    """index_scores with -inf at entries that a row may not select."""
    score, _ = index_scores(a)
    entry = np.arange(score.shape[1])
    allowed = entry[None, :] < a["count"][:, None]
    if "blocks" in a:
        block = int(a["block"]) if "block" in a else CANDIDATE_BLOCK
        listed = [np.isin(entry // block, row[row >= 0]) for row in a["blocks"]]
        allowed &= np.stack(listed)
    return np.where(allowed, score, -np.inf)


def index_select(a):
    return {"idx": np.stack([best_ascending(row, int(a["k"])) for row in visible_scores(a)])}


def candidate_blocks(a):
    block = int(a["block"]) if "block" in a else CANDIDATE_BLOCK
    out = []
    for score, count in zip(a["score"].astype(np.float64), a["count"], strict=True):
        starts = range(0, int(count), block)
        best = np.array([score[s : min(s + block, int(count))].max() for s in starts])
        best[-1:] = np.inf  # the block of the newest position
        out.append(best_ascending(best, int(a["k"])))
    return {"blocks": np.stack(out)}
