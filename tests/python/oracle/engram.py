"""N-gram memory: hash, look-up and application."""

import numpy as np

from oracle.formats import bf, bf16_bits, bf16_value, e4m3_value, ue8m0_value
from oracle.linear import fp8_linear
from oracle.mix import NORM_EPS, rms, sigmoid

PAD_TOKEN = 2
IMAGE_TOKEN = 129264
EPS = NORM_EPS["v41"]


def engram_hash(a):
    """Python integers throughout, so that nothing can wrap."""
    image = int(a["image_token"]) if "image_token" in a else IMAGE_TOKEN
    primes = [[int(p) for p in row] for row in a["prime"]]
    mult = [int(m) for m in a["mult"]]
    pad = int(a["map"][PAD_TOKEN])
    ids = np.zeros((len(a["token"]), 24), np.int64)
    for t, token in enumerate(a["token"]):
        chain = [int(token)] + [int(c) for c in a["history"][t][::-1]]
        products, blocked = [], False
        for shift, c in enumerate(chain):
            blocked = blocked or shift > int(a["pos"][t]) or c == image
            products.append((pad if blocked else int(a["map"][c])) * mult[shift])
        offset, rolling = 0, products[0]
        for n in range(3):
            rolling ^= products[n + 1]
            for head in range(8):
                ids[t, n * 8 + head] = rolling % primes[n][head] + offset
                offset += primes[n][head]
    return {"ids": ids}


def engram_lookup(a):
    values = e4m3_value(a["table"]) * np.repeat(ue8m0_value(a["table_scale"]), 32, axis=1)
    return {"e": bf16_bits(values[a["ids"]].reshape(len(a["ids"]), -1))}


def engram_apply(a):
    residual = bf16_value(a["residual"])
    num_rows, _, hidden = residual.shape
    kv = bf(fp8_linear(bf16_value(a["e"]), a["wkv"], a["wkv_scale"], 32))
    kv = kv.reshape(num_rows, 5, hidden)
    keys, value = kv[:, :4], kv[:, 4:]
    gain = bf16_value(a["q_weight"]) * bf16_value(a["k_weight"])
    dot = (residual * gain * keys).sum(-1)
    dot = dot / (rms(residual, EPS) * rms(keys, EPS))[..., 0] * hidden**-0.5
    g = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot))
    return {"residual": bf16_bits(residual + g[..., None] * value)}
