"""Index queries, scores and selections."""

import numpy as np

from oracle.formats import bf, bf16_bits, bf16_value, fp4_round_trip_ue8m0, fp4_value, ue8m0_value
from oracle.rope_kv import ROPE_DIM, rotate

CANDIDATE_BLOCK = 8


def index_query(a):
    q = bf16_value(a["q"])
    q[..., -ROPE_DIM:] = bf(rotate(q[..., -ROPE_DIM:], a["pos"], yarn=True))
    return {"iq": bf16_bits(fp4_round_trip_ue8m0(q)[0])}


def index_scores(iq, ik, weights):
    """float64 [T,N]: iq bf16 bits [T,h,128], ik rows u8 [N,68], weights [T,h]."""
    keys = fp4_value(ik[:, :64]) * np.repeat(ue8m0_value(ik[:, 64:]), 32, axis=1)
    dots = np.maximum(np.einsum("thd,nd->thn", bf16_value(iq), keys), 0.0)
    return np.einsum("th,thn->tn", weights.astype(np.float64), dots)


def best_ascending(score, k):
    """The k largest of score [n] (lowest index on ties; -inf never), ascending, -1 at the end."""
    order = np.argsort(-score, kind="stable")[:k]
    order = np.sort(order[score[order] > -np.inf])
    return np.concatenate([order, np.full(k - len(order), -1)]).astype(np.int32)


def index_select(a):
    score = index_scores(a["iq"], a["ik"], a["weights"])
    k = int(a["k"].reshape(()))
    idx = [best_ascending(row[: int(n)], k) for row, n in zip(score, a["count"], strict=True)]
    return {"idx": np.stack(idx)}


def candidate_blocks(a):
    raise NotImplementedError
