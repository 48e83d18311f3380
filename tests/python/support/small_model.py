"""Models of either kind with every kind of layer, small sizes and seeded weights."""

import zlib
from dataclasses import dataclass

import numpy as np
from oracle.formats import bf16_bits

from support import kernels_abi as abi

V41_KIND, V4_KIND = 1, 2


def primes(first, count):
    found = []
    while len(found) < count:
        if all(first % d for d in range(2, int(first**0.5) + 1)):
            found.append(first)
        first += 1
    return found


def layer(ratio=0, kv_source=-1, index_source=-1, candidate_source=-1, engram=-1, hash_gate=0):
    return dict(
        ratio=ratio,
        kv_source=kv_source,
        index_source=index_source,
        candidate_source=candidate_source,
        engram=engram,
        hash_gate=hash_gate,
    )


def v4_layers(ratios, num_hash_layers):
    """V4 has no sources but a layer itself, and selects at ratio 4 alone."""
    return [
        layer(
            ratio,
            kv_source=idx if ratio else -1,
            index_source=idx if ratio == 4 else -1,
            hash_gate=int(idx < num_hash_layers),
        )
        for idx, ratio in enumerate(ratios)
    ]


# Sizes differ wherever two could be swapped.
COMMON = dict(
    head_dim=512,
    rope_dim=64,
    index_dim=128,
    sinkhorn_iters=20,
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
    draft_block=5,
    num_widths=4,
    widths=[1, 2, 6, 12],
    max_batch=2,
    wait_budget_ns=30_000_000_000,
)
V41_SIZES = COMMON | dict(
    kind=V41_KIND,
    hidden=96,
    vocab=96,
    num_heads=4,
    q_lora=64,
    o_groups=2,
    o_lora=32,
    window=12,
    num_experts=10,
    experts_per_token=4,
    moe_intermediate=128,
    index_heads=3,
    index_topk=6,
    candidate_blocks=3,
    candidate_block_size=4,
    scale_block=32,
    norm_eps=1e-20,
    num_engrams=2,
    engram_head_dim=32,
    engram_pad_token=2,
    image_token=93,
    engram_primes=np.array(primes(41, 48)).reshape(2, 3, 8).tolist(),
    engram_multipliers=[
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ],
    draft_mask_token=94,
    markov_rank=16,
    draft_experts=6,
    draft_experts_per_token=3,
    max_rows=64,
    page_size=8,
    num_pages=20,
    state_ring=8,
)
V4_SIZES = COMMON | dict(
    kind=V4_KIND,
    hidden=384,
    vocab=96,
    num_heads=4,
    q_lora=128,
    o_groups=2,
    o_lora=128,
    window=12,
    num_experts=10,
    experts_per_token=6,
    moe_intermediate=256,
    index_heads=3,
    index_topk=6,
    candidate_layer=-1,
    scale_block=128,
    norm_eps=1e-6,
    image_token=-1,
    draft_mask_token=94,
    markov_rank=16,
    draft_experts=8,
    draft_experts_per_token=3,
    max_rows=288,
    page_size=128,
    num_pages=6,
    state_ring=16,
)


@dataclass(frozen=True)
class Lengths:
    """Of the two requests that are replayed: rows of each one's two chunks of prompt, and where its
    image tokens are."""

    chunks: tuple
    images: tuple = ((), ())


STEPS = (11, 6)  # tokens that each one's steps commit after the prompt
# Both end on an even token once, whose pair waits in the state while others are rejected.
EVEN = Lengths(((13, 24), (22, 7)), ((5, 6, 7, 24, 40, 46), (1, 17, 31)))
# An entry of 128 tokens is completed by a rejected draft, over which the next step writes: here the
# first request's first one ...
FIRST_ENTRY = Lengths(((13, 112), (22, 23)))
# ... and here its second, where the ring of 256 rows wraps too, and the other's first.
SECOND_ENTRY = Lengths(((13, 238), (22, 103)))
# The first one crosses a page. The other is in the middle of one when a step rejects all drafts,
# and the entry that the next step completes needs the seven tokens before from the page's ring.
OVERLAP = Lengths(((13, 238), (19, 7)))


@dataclass(frozen=True)
class SmallModel:
    """A configuration, and the sizes of its weights.

    At unit size a sublayer adds little to the streams and the streams stay alike, and then a
    mistake in a layer's order is as small as the rounding. `larger` gives powers of two over unit
    size by part of a name, the first that fits.
    """

    config: dict
    lengths: Lengths
    larger: dict
    entry_size: float  # of compressed keys, over window keys
    embed_size: float = 0.5
    mix_size: float = 2.0  # of the bases of hyper-connections: uneven mixes


def small_model(sizes, layers, lengths, larger, entry_size, num_draft_stages=3, **fields):
    """A draft of as many stages as the last layers that its features are of."""
    num_layers = len(layers)
    config = sizes | dict(
        num_layers=num_layers,
        layers=layers,
        num_draft_stages=num_draft_stages,
        draft_target_layers=list(range(num_layers - num_draft_stages, num_layers)),
        **fields,
    )
    return SmallModel(config, lengths, larger, entry_size)


# Of layers: window only; a table before a window layer and before a compressed one; sources of
# either ratio, layers that reuse their selection and their pool, and an index source that is
# restricted to another's candidate blocks.
DEEP = small_model(
    V41_SIZES,
    [
        layer(),
        layer(engram=0),
        layer(2, 2, 2),
        layer(2, 2, 2, engram=1),
        layer(2, 4, 4),
        layer(1, 5, 5),
        layer(1, 5, 5),
        layer(1, 5, 7, candidate_source=5),
        layer(1, 5, 7),
    ],
    lengths=EVEN,
    candidate_layer=5,
    larger={"mtp.0.attn.wo_b": 1, "mtp.": 0, "wo_b": 2, "w2": 1, "engram.embed": 3},
    entry_size=1.5,
)
# What DEEP reaches after its roundings have met many others, here at once: most rows are equal to
# the bit, and attention, compressed keys above all, weighs as much as the experts.
SHORT = small_model(
    V41_SIZES,
    [
        layer(2, 0, 0, engram=0),
        layer(1, 1, 1),
        layer(1, 1, 2, candidate_source=1, engram=1),
        layer(1, 1, 2),
    ],
    lengths=EVEN,
    candidate_layer=1,
    larger={"ffn.experts.w": -1, "wo_b": 1, "engram.embed": 3},
    entry_size=2.0,
)
# V4 in the sizes of the built-in tiny-v4: either ratio and window layers, and three of them with
# experts by token.
V4_DEEP = small_model(
    V4_SIZES
    | dict(
        hidden=128,
        vocab=512,
        num_heads=8,
        o_groups=4,
        window=32,
        num_experts=16,
        moe_intermediate=512,
        index_heads=4,
        index_topk=16,
        draft_mask_token=500,
        markov_rank=32,
        draft_experts=16,
        draft_experts_per_token=6,
    ),
    v4_layers([0, 0, 4, 128, 4, 128, 4, 128], num_hash_layers=3),
    lengths=FIRST_ENTRY,
    larger={},
    entry_size=1.0,
)


def v4_one(ratio, num_hash_layers=0, lengths=SECOND_ENTRY):
    """One layer and a draft of one stage: nearly every row is equal to the bit."""
    return small_model(
        V4_SIZES,
        v4_layers([ratio], num_hash_layers),
        lengths=lengths,
        larger={"ffn.experts.w": -1, "wo_b": 1},
        entry_size=2.0,
        num_draft_stages=1,
    )


V4_ONE = {
    "v4-window": v4_one(0),
    "v4-hash": v4_one(0, num_hash_layers=1),
    "v4-ratio-4": v4_one(4, lengths=OVERLAP),
    "v4-ratio-128": v4_one(128),
}
MODELS = {"deep": DEEP, "short": SHORT, "v4-deep": V4_DEEP} | V4_ONE

# By lowlat_dtype.
I32, I64, F32, BF16, E4M3, UE8M0, FP4 = 1, 2, 3, 4, 5, 6, 7
DTYPE = {"i32": I32, "f32": F32, "bf16": BF16, "e4m3": E4M3, "ue8m0": UE8M0, "fp4": FP4}


class Weights:
    """Whole tensors by name, made when first asked for, and a rank's part of each."""

    def __init__(self, small, seed, tp_size):
        self.small, self.seed, self.tp_size, self.whole = small, seed, tp_size, {}

    def shard(self, spec, rank):
        name, dim = spec.name.decode(), spec.shard_dim
        shape = list(spec.shape[: spec.ndim])
        first = rank * shape[dim] if dim >= 0 else 0
        count = shape[dim] if dim >= 0 else 0
        if "engram.embed" in name:
            config = self.small.config
            table = config["layers"][int(name.split(".")[1])]["engram"]
            rows = np.array(config["engram_primes"][table]).reshape(self.tp_size, -1).sum(1)
            first, shape[0] = int(rows[:rank].sum()), int(rows.sum())
        elif dim >= 0:
            shape[dim] *= self.tp_size
        if name not in self.whole:
            self.whole[name] = self.make(name, spec.dtype, tuple(shape))
        whole = self.whole[name]
        return whole if dim < 0 else np.take(whole, range(first, first + count), dim)

    def make_whole(self, listed):
        """Every tensor of a list as of oracle.tensors, for a model without kernels."""
        for name, dtype, shape, _ in listed:
            self.whole[name] = self.make(name, DTYPE[dtype], shape)
        return self.whole

    def make(self, name, dtype, shape):
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        normal = rng.standard_normal(shape)
        if dtype == I64:
            return rng.integers(0, 80, shape)
        if dtype == I32:  # of each token, different experts
            experts = self.small.config["num_experts"]
            rows = [rng.permutation(experts)[: shape[1]] for _ in range(shape[0])]
            return np.array(rows, np.int32)
        if dtype == E4M3:  # of |value| below 2, and both signs
            return rng.integers(0, 64, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
        if dtype == FP4:
            return rng.integers(0, 256, shape, np.uint8)
        if dtype == UE8M0:
            return self.scales(rng, name, shape)
        if "norm.weight" in name or name.endswith(("q_weight", "k_weight", "_scale")):
            normal = 1.0 + 0.25 * normal
        elif len(shape) > 1 and name != "embed.weight" and not name.endswith(".ape"):
            normal *= shape[-1] ** -0.5
        if name.endswith(("bias", "bias_vl")):
            normal *= 0.3
        elif name == "embed.weight":
            normal *= self.small.embed_size
        elif name.endswith("_base"):
            normal *= self.small.mix_size * (2.0 if "hc_head" in name else 1.0)
        elif name.endswith("compressor.norm.weight"):
            normal *= self.small.entry_size
        return normal.astype(np.float32) if dtype == F32 else bf16_bits(normal)

    def scales(self, rng, name, shape):
        """Products of about unit size."""
        group = 32 if ".experts." in name else self.small.config["scale_block"]
        fan_in = shape[-1] * group
        power = round(np.log2(fan_in**0.5))
        power -= next((larger for part, larger in self.small.larger.items() if part in name), 0)
        return (127 - power - rng.integers(0, 2, shape)).astype(np.uint8)


def create(path, weights):
    return abi.Group(path, weights.small.config, weights.tp_size, weights.shard)
