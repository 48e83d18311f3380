"""Random inputs for every operation and model, by shape: for tests and for the golden vectors."""

import numpy as np

from oracle.formats import bf16_bits
from oracle.rope_kv import kv_pack

# The Engram constants of layer 1: 24 successive primes above 15999999, and the hash multipliers.
MULTIPLIERS = [76632096046245, 4839876093313, 35959672319349, 73987337458391]


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def primes_after(start, count):
    found = []
    while len(found) < count:
        start += 1
        if is_prime(start):
            found.append(start)
    return found


def one(value):
    """An i64 array of no dimensions."""
    return np.array(value, np.int64)


def bf16(rng, *shape, scale=1.0):
    return bf16_bits(rng.standard_normal(shape) * scale)


def f32(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def e4m3(rng, *shape):
    """Any code but the two NaNs."""
    code = rng.integers(0, 127, shape, np.uint8)
    return code | (rng.integers(0, 2, shape, np.uint8) << 7)


def fp4(rng, *shape):
    return rng.integers(0, 256, shape, np.uint8)


def ue8m0(rng, *shape, low=115, high=121):
    return rng.integers(low, high, shape, np.uint8)


def power_scale(rng, *shape, low=-12, high=-6):
    return np.ldexp(1.0, rng.integers(low, high, shape)).astype(np.float32)


def kv_rows(rng, n):
    if n == 0:
        return np.zeros((0, 584), np.uint8)
    return kv_pack({"kv": f32(rng, n, 512)})["rows"]


def index_rows_v4(rng, n):
    rows = np.empty((n, 132), np.uint8)
    rows[:, :128] = e4m3(rng, n, 128)
    scale = rng.uniform(0.5, 2.0, n).astype(np.float32) / np.float32(448.0)
    rows[:, 128:] = scale.astype("<f4")[:, None].view(np.uint8)
    return rows


def index_rows(rng, n):
    rows = np.empty((n, 68), np.uint8)
    rows[:, :64] = fp4(rng, n, 64)
    rows[:, 64:] = ue8m0(rng, n, 4, low=124, high=128)
    return rows


def picks(rng, rows, width, bound, fill=0.8):
    """i32 [rows,width] of distinct indices below `bound`, some -1."""
    out = np.full((rows, width), -1, np.int32)
    for row in out:
        n = min(bound, int(rng.binomial(width, fill)))
        row[rng.permutation(width)[:n]] = rng.permutation(bound)[:n]
    return out


def hc_stats(rng, T, H):
    return {
        "residual": bf16(rng, T, 4, H),
        "fn": f32(rng, 24, 4 * H, scale=(4 * H) ** -0.5),
        "base": f32(rng, 24),
        "scale": f32(rng, 3),
    }


def hc_head(rng, T, H):
    return {
        "residual": bf16(rng, T, 4, H),
        "fn": f32(rng, 4, 4 * H, scale=(4 * H) ** -0.5),
        "base": f32(rng, 4),
        "scale": f32(rng, 1),
    }


def hc_combine_norm(rng, T, H):
    return {
        "residual": bf16(rng, T, 4, H),
        "pre": rng.uniform(0, 1, (T, 4)).astype(np.float32),
        "gain": bf16(rng, H),
    }


def hc_post(rng, T, H):
    return {
        "residual": bf16(rng, T, 4, H),
        "y": bf16(rng, T, H),
        "post": rng.uniform(0, 2, (T, 4)).astype(np.float32),
        "comb": rng.uniform(0, 0.5, (T, 4, 4)).astype(np.float32),
    }


def rms_norm(rng, T, H):
    return {"x": bf16(rng, T, H), "gain": bf16(rng, H)}


def head_norm(rng, T, h):
    return {"x": bf16(rng, T, h, 512)}


def rank_sum(rng, R, T, H):
    return {"partial": f32(rng, R, T, H)}


def block_linear(rng, T, N, K, b=32):
    return {
        "x": bf16(rng, T, K),
        "w": e4m3(rng, N, K),
        "w_scale": power_scale(rng, N // b, K // b),
        "block": one(b),
    }


def lm_head(rng, T, V, H):
    return {"x": bf16(rng, T, H), "w": bf16(rng, V, H, scale=H**-0.5)}


def rope(rng, T, h, D, yarn=0, inverse=0):
    pos = rng.integers(0, 1 << 20, T)
    pos[: min(3, T)] = [0, 65535, 1048575][: min(3, T)]
    return {
        "x": bf16(rng, T, h, D),
        "pos": pos.astype(np.int64),
        "yarn": one(yarn),
        "inverse": one(inverse),
    }


def kv_pack_(rng, T):
    kv = f32(rng, T, 512) * np.exp2(rng.integers(-12, 12, (T, 1))).astype(np.float32)
    return {"kv": kv}


def kv_unpack(rng, T):
    return {"rows": kv_pack(kv_pack_(rng, T))["rows"]}


def sparse_attention(rng, T, h, S, s, E, n):
    return {
        "q": bf16(rng, T, h, 512),
        "swa": kv_rows(rng, S),
        "swa_idx": picks(rng, T, s, S),
        "extra": kv_rows(rng, E),
        "extra_idx": picks(rng, T, n, E),
        "sink": f32(rng, h),
    }


def compress(rng, L, H, ratio):
    arrays = {
        "x": bf16(rng, L, H),
        "wkv": bf16(rng, 512, H, scale=H**-0.5),
        "norm": bf16(rng, 512),
        "ratio": one(ratio),
    }
    if ratio == 2:
        arrays["wgate"] = bf16(rng, 512, H, scale=H**-0.5)
    return arrays


def compress_v4(rng, L, H, ratio):
    width = 1024 if ratio == 4 else 512
    return {
        "x": bf16(rng, L, H),
        "wkv": bf16(rng, width, H, scale=H**-0.5),
        "wgate": bf16(rng, width, H, scale=H**-0.5),
        "ape": f32(rng, ratio, width),
        "norm": bf16(rng, 512),
        "ratio": one(ratio),
    }


def index_query(rng, T, h):
    pos = rng.integers(0, 1 << 20, T)
    pos[:1] = 1048575
    return {"q": bf16(rng, T, h, 128), "pos": pos.astype(np.int64)}


def index_key(rng, T):
    pos = rng.integers(0, 1 << 20, T)
    pos[-1] = 1048575
    return {
        "latent": bf16(rng, T, 512),
        "wk": bf16(rng, 128, 512, scale=512**-0.5),
        "norm": bf16(rng, 128),
        "pos": pos.astype(np.int64),
    }


def index_key_v4(rng, L, H):
    return {
        "x": bf16(rng, L, H),
        "wkv": bf16(rng, 256, H, scale=H**-0.5),
        "wgate": bf16(rng, 256, H, scale=H**-0.5),
        "ape": f32(rng, 4, 256),
        "norm": bf16(rng, 128),
    }


def candidate_blocks(rng, T, N, k, block=None):
    count = rng.integers(0, N + 1, T)
    count[0] = N
    arrays = {"score": f32(rng, T, N), "count": count.astype(np.int64), "k": one(k)}
    if block is not None:
        arrays["block"] = one(block)
    return arrays


def index_select(rng, T, h, N, k, M=0):
    """With M > 0: M candidate blocks of 8 a row, fewer where the row sees fewer."""
    count = rng.integers(0, N + 1, T)
    count[0] = N
    arrays = {
        "iq": bf16(rng, T, h, 128),
        "ik": index_rows(rng, N),
        "weights": f32(rng, T, h, scale=h**-0.5),
        "count": count.astype(np.int64),
        "k": one(k),
    }
    if M > 0:
        arrays["blocks"] = np.full((T, M), -1, np.int32)
        for row, seen in zip(arrays["blocks"], count, strict=True):
            picked = np.sort(rng.permutation(-(-int(seen) // 8))[:M])
            row[: len(picked)] = picked
    return arrays


def index_select_v4(rng, T, h, N, k):
    count = rng.integers(0, N + 1, T)
    count[0] = N
    return {
        "iq": e4m3(rng, T, h, 128),
        "ik": index_rows_v4(rng, N),
        "weights": f32(rng, T, h, scale=h**-0.5),
        "count": count.astype(np.int64),
        "k": one(k),
    }


def hash_gate(rng, T, V, H, E):
    return {
        "token": rng.integers(0, V, T).astype(np.int64),
        "table": np.stack([rng.permutation(E)[:6] for _ in range(V)]).astype(np.int32),
        "x": bf16(rng, T, H),
        "w": bf16(rng, E, H, scale=2 * H**-0.5),
    }


def gate(rng, T, H, E, k=None):
    arrays = {
        "x": bf16(rng, T, H),
        "w": bf16(rng, E, H, scale=2 * H**-0.5),
        "bias": f32(rng, E, scale=0.2),
    }
    if k is not None:
        arrays["k"] = one(k)
    return arrays


def experts(rng, T, E, H, I, k=6, b=32):  # noqa: E741 - the model's own letters
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.int32)
    arrays = {"x": bf16(rng, T, H), "ids": ids}
    arrays["weight"] = rng.uniform(0.05, 0.5, (T, k)).astype(np.float32)
    for name, rows, cols in (("w1", I, H), ("w3", I, H), ("w2", H, I)):
        arrays[name] = fp4(rng, E, rows, cols // 2)
        arrays[name + "_scale"] = ue8m0(rng, E, rows, cols // 32, low=121, high=125)
        arrays["shared_" + name] = e4m3(rng, rows, cols)
        arrays[f"shared_{name}_scale"] = power_scale(rng, rows // b, cols // b, low=-11, high=-8)
    return arrays


def engram_hash(rng, T, V, image=True):
    primes = np.array(primes_after(15999999 + 40, 24), np.int64).reshape(3, 8)
    pos = rng.integers(0, 8, T)
    pos[-1] = 1048575
    arrays = {
        "token": rng.integers(0, V, T).astype(np.int64),
        "history": rng.integers(0, V, (T, 3)).astype(np.int64),
        "pos": pos.astype(np.int64),
        "map": rng.integers(0, 99092, V).astype(np.int64),
        "mult": np.array(MULTIPLIERS, np.int64),
        "prime": primes,
    }
    if image:
        arrays["image_token"] = one(int(arrays["history"][0, 1]))
    return arrays


def engram_lookup(rng, T, rows, D):
    return {
        "ids": rng.integers(0, rows, (T, 24)).astype(np.int64),
        "table": e4m3(rng, rows, D),
        "table_scale": ue8m0(rng, rows, D // 32),
    }


def engram_apply(rng, T, H, D):
    K = 24 * D
    return {
        "residual": bf16(rng, T, 4, H),
        "e": bf16(rng, T, K),
        "wkv": e4m3(rng, 5 * H, K),
        "wkv_scale": power_scale(rng, 5 * H // 32, K // 32, low=-13, high=-10),
        "q_weight": bf16(rng, 4, H),
        "k_weight": bf16(rng, 4, H),
    }


def markov_draft(rng, B, g, V, R):
    temp = rng.uniform(0.3, 1.5, B).astype(np.float32)
    temp[::2] = 0.0
    return {
        "base": f32(rng, B, g, V),
        "w1": bf16(rng, V, R),
        "w2": bf16(rng, V, R, scale=R**-0.5),
        "anchor": rng.integers(0, V, B).astype(np.int64),
        "temp": temp,
        "uniform": rng.uniform(1e-6, 1 - 1e-6, (B, g, V)).astype(np.float32),
    }


def accept(rng, B, g, V):
    temp = rng.uniform(0.3, 1.5, B).astype(np.float32)
    temp[::2] = 0.0
    target = f32(rng, B, g + 1, V, scale=2.0)
    draft_logits = target[:, :g] + f32(rng, B, g, V, scale=0.5)
    return {
        "draft": draft_logits.argmax(-1).astype(np.int64),
        "target_logits": target,
        "draft_logits": draft_logits.astype(np.float32),
        "temp": temp,
        "coins": rng.uniform(0, 1, (B, g + 1)).astype(np.float32),
    }


# Shapes: one row, one request's verify rows, the widest; sizes that are no power of two.
V41 = {
    "hc_stats": (hc_stats, [dict(T=1, H=32), dict(T=6, H=160), dict(T=48, H=96)]),
    "hc_combine_norm": (hc_combine_norm, [dict(T=1, H=32), dict(T=6, H=160), dict(T=48, H=96)]),
    "hc_post": (hc_post, [dict(T=1, H=32), dict(T=6, H=160), dict(T=48, H=96)]),
    "rms_norm": (rms_norm, [dict(T=1, H=32), dict(T=6, H=160), dict(T=48, H=96)]),
    "rank_sum": (rank_sum, [dict(R=1, T=1, H=32), dict(R=4, T=6, H=160), dict(R=8, T=48, H=96)]),
    "block_linear": (
        block_linear,
        [
            dict(T=1, N=32, K=32),
            dict(T=6, N=96, K=160),
            dict(T=48, N=64, K=224),
            dict(T=3, N=128, K=256, b=128),
        ],
    ),
    "lm_head": (lm_head, [dict(T=1, V=8, H=32), dict(T=6, V=77, H=160), dict(T=48, V=64, H=96)]),
    "rope": (
        rope,
        [
            dict(T=1, h=1, D=64, yarn=1),
            dict(T=6, h=3, D=128, yarn=1, inverse=1),
            dict(T=48, h=2, D=512),
            dict(T=5, h=5, D=512, inverse=1),
        ],
    ),
    "kv_pack": (kv_pack_, [dict(T=1), dict(T=6), dict(T=48)]),
    "kv_unpack": (kv_unpack, [dict(T=1), dict(T=6), dict(T=48)]),
    "sparse_attention": (
        sparse_attention,
        [
            dict(T=1, h=1, S=128, s=128, E=4, n=0),
            dict(T=6, h=3, S=140, s=128, E=60, n=40),
            dict(T=5, h=2, S=133, s=133, E=4, n=0),
            dict(T=48, h=1, S=180, s=128, E=600, n=512),
        ],
    ),
    "compress": (
        compress,
        [
            dict(L=1, H=32, ratio=1),
            dict(L=7, H=96, ratio=1),
            dict(L=2, H=32, ratio=2),
            dict(L=33, H=96, ratio=2),
        ],
    ),
    "index_query": (index_query, [dict(T=1, h=1), dict(T=6, h=3), dict(T=48, h=4)]),
    "index_select": (
        index_select,
        [
            dict(T=1, h=1, N=1, k=16),
            dict(T=6, h=3, N=77, k=16),
            dict(T=48, h=4, N=600, k=512),
            dict(T=6, h=2, N=90, k=16, M=4),
        ],
    ),
    "index_key": (index_key, [dict(T=1), dict(T=6), dict(T=48)]),
    "candidate_blocks": (
        candidate_blocks,
        [dict(T=1, N=1, k=4), dict(T=6, N=77, k=4), dict(T=48, N=200, k=16, block=3)],
    ),
    "gate": (
        gate,
        [
            dict(T=1, H=32, E=6),
            dict(T=6, H=160, E=17),
            dict(T=48, H=96, E=40),
            dict(T=5, H=96, E=8, k=3),
        ],
    ),
    "experts": (
        experts,
        [
            dict(T=1, E=6, H=32, I=32),
            dict(T=6, E=17, H=160, I=96),
            dict(T=48, E=8, H=64, I=160),
            dict(T=5, E=8, H=96, I=64, k=3),
        ],
    ),
    "engram_hash": (
        engram_hash,
        [dict(T=1, V=3), dict(T=6, V=40), dict(T=48, V=500)],
    ),
    "engram_lookup": (
        engram_lookup,
        [dict(T=1, rows=30, D=32), dict(T=6, rows=100, D=96), dict(T=48, rows=500, D=64)],
    ),
    "engram_apply": (
        engram_apply,
        [dict(T=1, H=32, D=32), dict(T=6, H=160, D=32), dict(T=48, H=64, D=32)],
    ),
    "markov_draft": (
        markov_draft,
        [dict(B=1, g=5, V=8, R=4), dict(B=3, g=5, V=77, R=33), dict(B=8, g=3, V=256, R=32)],
    ),
    "accept": (accept, [dict(B=1, g=5, V=8), dict(B=3, g=5, V=77), dict(B=8, g=3, V=256)]),
}

# Scale blocks of V4 are 128 wide.
V4 = {
    op: V41[op]
    for op in (
        "hc_stats",
        "hc_combine_norm",
        "hc_post",
        "rms_norm",
        "rank_sum",
        "lm_head",
        "rope",
        "kv_pack",
        "kv_unpack",
        "sparse_attention",
        "index_query",
        "markov_draft",
        "accept",
    )
} | {
    "hc_head": (hc_head, [dict(T=1, H=32), dict(T=6, H=160), dict(T=48, H=96)]),
    "head_norm": (head_norm, [dict(T=1, h=1), dict(T=6, h=5), dict(T=48, h=2)]),
    "block_linear": (
        block_linear,
        [
            dict(T=1, N=128, K=128, b=128),
            dict(T=6, N=256, K=384, b=128),
            dict(T=48, N=128, K=256, b=128),
        ],
    ),
    "compress": (
        compress_v4,
        [
            dict(L=4, H=32, ratio=4),
            dict(L=35, H=96, ratio=4),
            dict(L=128, H=32, ratio=128),
            dict(L=300, H=96, ratio=128),
        ],
    ),
    "index_key": (index_key_v4, [dict(L=4, H=32), dict(L=23, H=96), dict(L=190, H=64)]),
    "index_select": (
        index_select_v4,
        [
            dict(T=1, h=1, N=1, k=16),
            dict(T=6, h=3, N=77, k=16),
            dict(T=48, h=4, N=600, k=512),
        ],
    ),
    "gate": (gate, [dict(T=1, H=32, E=6), dict(T=6, H=160, E=17), dict(T=48, H=96, E=40)]),
    "hash_gate": (
        hash_gate,
        [dict(T=1, V=3, H=32, E=6), dict(T=6, V=40, H=160, E=17), dict(T=48, V=300, H=96, E=40)],
    ),
    "experts": (
        experts,
        [
            dict(T=1, E=6, H=128, I=128, b=128),
            dict(T=6, E=9, H=256, I=128, b=128),
            dict(T=48, E=8, H=128, I=256, b=128),
        ],
    ),
}

SHAPES = {"v41": V41, "v4": V4}


def make(op, seed, model="v41", **shape):
    """The inputs of `op` at `shape`; the seed and the operation's name fix every byte."""
    maker = SHAPES[model][op][0]
    name = op if model == "v41" else f"{op}_{model}"
    return maker(np.random.default_rng([seed, *name.encode()]), **shape)
