"""A V4.1 model with every kind of layer and small sizes, and seeded weights for it."""

import zlib

import numpy as np

from oracle.formats import bf16_bits
from support import kernels_abi as abi

IMAGE_TOKEN, MASK_TOKEN, VOCAB = 93, 94, 96
PAGE_SIZE, PAGES_PER_REQUEST = 8, 10


def primes(first, count):
    found = []
    while len(found) < count:
        if all(first % d for d in range(2, int(first**0.5) + 1)):
            found.append(first)
        first += 1
    return found


def layer(ratio=0, kv_source=-1, index_source=-1, candidate_source=-1, engram=-1):
    return dict(
        ratio=ratio,
        kv_source=kv_source,
        index_source=index_source,
        candidate_source=candidate_source,
        engram=engram,
    )


# Sizes differ wherever two could be swapped. Of layers: window only; a table before a window layer
# and before a compressed one; sources of either ratio, layers that reuse their selection and their
# pool, and an index source that is restricted to another's candidate blocks.
CONFIG = dict(
    kind=1,
    hidden=96,
    vocab=VOCAB,
    num_heads=4,
    head_dim=512,
    rope_dim=64,
    q_lora=64,
    o_groups=2,
    o_lora=32,
    window=12,
    num_experts=10,
    experts_per_token=4,
    moe_intermediate=128,
    index_heads=3,
    index_dim=128,
    index_topk=10,
    candidate_layer=5,
    candidate_blocks=3,
    candidate_block_size=4,
    scale_block=32,
    sinkhorn_iters=20,
    norm_eps=1e-20,
    hc_eps=1e-6,
    swiglu_limit=10.0,
    routed_scaling=1.5,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn_factor=16.0,
    yarn_beta_fast=32.0,
    yarn_beta_slow=1.0,
    yarn_original_positions=65536.0,
    max_positions=1 << 20,
    num_layers=8,
    layers=[
        layer(),
        layer(engram=0),
        layer(2, 2, 2),
        layer(2, 2, 2, engram=1),
        layer(2, 4, 4),
        layer(1, 5, 5),
        layer(1, 5, 5),
        layer(1, 5, 7, candidate_source=5),
    ],
    num_engrams=2,
    engram_head_dim=32,
    engram_pad_token=2,
    image_token=IMAGE_TOKEN,
    engram_primes=np.array(primes(41, 48)).reshape(2, 3, 8).tolist(),
    engram_multipliers=[
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ],
    num_draft_stages=3,
    draft_block=5,
    draft_mask_token=MASK_TOKEN,
    markov_rank=16,
    draft_experts=6,
    draft_experts_per_token=3,
    draft_target_layers=[5, 6, 7],
    num_widths=4,
    widths=[1, 2, 6, 12],
    max_batch=2,
    max_rows=64,
    page_size=PAGE_SIZE,
    num_pages=2 * PAGES_PER_REQUEST,
    state_ring=8,
    wait_budget_ns=30_000_000_000,
)

BF16, E4M3, UE8M0, FP4, I64, F32 = 4, 5, 6, 7, 2, 3


class Weights:
    """Whole tensors by name, made when first asked for, and a rank's part of each."""

    def __init__(self, seed, tp_size=1):
        self.seed, self.tp_size, self.whole = seed, tp_size, {}

    def shard(self, spec, rank):
        name, dim = spec.name.decode(), spec.shard_dim
        shape = list(spec.shape[: spec.ndim])
        first = rank * shape[dim] if dim >= 0 else 0
        count = shape[dim] if dim >= 0 else 0
        if "engram.embed" in name:
            table = CONFIG["layers"][int(name.split(".")[1])]["engram"]
            rows = np.array(CONFIG["engram_primes"][table]).reshape(self.tp_size, -1).sum(1)
            first, shape[0] = int(rows[:rank].sum()), int(rows.sum())
        elif dim >= 0:
            shape[dim] *= self.tp_size
        if name not in self.whole:
            self.whole[name] = self.make(name, spec.dtype, tuple(shape))
        whole = self.whole[name]
        return whole if dim < 0 else np.take(whole, range(first, first + count), dim)

    def make(self, name, dtype, shape):
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        normal = rng.standard_normal(shape)
        if dtype == I64:
            return rng.integers(0, 80, shape)
        if dtype == E4M3:  # of |value| below 2, and both signs
            return rng.integers(0, 64, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
        if dtype == FP4:
            return rng.integers(0, 256, shape, np.uint8)
        if dtype == UE8M0:
            return self.scales(rng, name, shape)
        if "norm.weight" in name or name.endswith(("q_weight", "k_weight")):
            normal = 1.0 + 0.25 * normal
        elif name.endswith("_scale"):
            normal = 1.0 + 0.25 * normal
        elif name.endswith(("fn", "gate.weight")):
            normal *= shape[-1] ** -0.5
        elif len(shape) > 1 and name != "embed.weight":
            normal *= shape[-1] ** -0.5
        if name.endswith(("bias", "bias_vl")):
            normal *= 0.3
        return normal.astype(np.float32) if dtype == F32 else bf16_bits(normal)

    def scales(self, rng, name, shape):
        """Products of about unit size."""
        fan_in = shape[-1] * 32
        power = round(np.log2(fan_in**0.5))
        return (127 - power - rng.integers(0, 2, shape)).astype(np.uint8)


def create(path, weights):
    return abi.Group(path, CONFIG, weights.tp_size, weights.shard)
