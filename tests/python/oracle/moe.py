"""Routing and experts."""

import numpy as np

from oracle.formats import bf, bf16_value, f32, fp4_value, ue8m0_value
from oracle.linear import fp8_linear
from oracle.mix import sigmoid

ROUTED_SCALING = 1.5
SWIGLU_LIMIT = 10.0


def scores(x, w, model="v41"):
    """sqrt(softplus(x w^T)), float64 [T,E]."""
    z = x @ w.T
    if model == "v4":
        return np.sqrt(np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z))))
    with np.errstate(over="ignore"):
        return np.sqrt(np.where(z > 20.0, z, np.log1p(np.exp(z))))


def gate(a, model="v41"):
    k = int(a["k"]) if "k" in a else 6
    score = scores(bf16_value(a["x"]), bf16_value(a["w"]), model)
    rank = score + a["bias"].astype(np.float64)
    ids = np.argsort(-rank, axis=1, kind="stable")[:, :k]
    picked = np.take_along_axis(score, ids, 1)
    total = picked.sum(1, keepdims=True)
    # V4.1's target adds 1e-20; its draft (three experts) and V4 divide by 1 where the sum is not
    # positive.
    adds = model == "v41" and k != 3
    total = total + 1e-20 if adds else np.where(total <= 0, 1.0, total)
    return {"ids": ids.astype(np.int32), "weight": f32(picked / total * ROUTED_SCALING)}


def hash_gate(a):
    """V4's first layers: the token chooses the experts, the router only weighs them."""
    ids = a["table"][a["token"]]
    score = scores(bf16_value(a["x"]), bf16_value(a["w"]), "v4")
    picked = np.take_along_axis(score, ids.astype(np.int64), 1)
    weight = picked / (picked.sum(1, keepdims=True) + 1e-20) * ROUTED_SCALING
    return {"ids": ids.astype(np.int32), "weight": f32(weight)}


def mxfp4(packed, scale):
    """[N,K/2] bytes and [N,K/32] scale bytes to float64 [N,K]."""
    return fp4_value(packed) * np.repeat(ue8m0_value(scale), 32, axis=-1)


def swiglu(gate_in, up):
    g = np.minimum(gate_in, SWIGLU_LIMIT)
    return g * sigmoid(g) * np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)


def routed(a):
    """float64 [T,H], nothing rounded on the way."""
    x = bf16_value(a["x"])
    y = np.zeros(x.shape)
    for e in np.unique(a["ids"]):
        w1, w3, w2 = (mxfp4(a[n][e], a[n + "_scale"][e]) for n in ("w1", "w3", "w2"))
        rows, slots = np.nonzero(a["ids"] == e)
        h = swiglu(x[rows] @ w1.T, x[rows] @ w3.T)
        np.add.at(y, rows, a["weight"][rows, slots].astype(np.float64)[:, None] * (h @ w2.T))
    return y


def shared(a):
    """float64 [T,H]; what feeds a quantised input is a chain of bf16 tensors: gate, up and h."""
    x = bf16_value(a["x"])
    block = a["shared_w1"].shape[1] // a["shared_w1_scale"].shape[1]

    def linear(value, name):
        return fp8_linear(value, a[name], a[name + "_scale"], block)

    h = bf(swiglu(bf(linear(x, "shared_w1")), bf(linear(x, "shared_w3"))))
    return linear(h, "shared_w2")


def experts(a):
    return {"y": f32(routed(a) + shared(a))}
