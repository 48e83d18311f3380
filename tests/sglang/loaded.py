"""What SGLang's loading leaves on sm_90 of weights that are given by their published names: fused
matrices, fp32 scales, experts in Marlin's tiles; and its own caches beside those of our models.
"""

from unittest import mock

import numpy as np
import torch
from sglang.srt.layers.quantization.marlin_utils import get_scale_perms
from sglang.srt.mem_cache import deepseek_v4_memory_pool
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

FP4_GROUP, MARLIN_WIDTH = 32, 64


def bf16(array):
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)


def e4m3(array):
    return torch.from_numpy(np.ascontiguousarray(array)).view(torch.float8_e4m3fn)


def powers(array):
    """ue8m0 codes as the fp32 scales that SGLang keeps."""
    return torch.from_numpy(np.ldexp(np.float32(1), array.astype(np.int32) - 127))


def nibble_order():
    """The order of Marlin's repack inside 16 rows by 64 columns, four bits each."""
    order = []
    for lane in range(32):
        column = lane // 4
        one = [
            16 * row + column + 8 * block
            for block in (0, 1)
            for row in (
                2 * (lane % 4),
                2 * (lane % 4) + 1,
                2 * (lane % 4 + 4),
                2 * (lane % 4 + 4) + 1,
            )
        ]
        for block in range(4):
            order.extend(place + 256 * block for place in one)
    return np.array(order).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()


def marlin(codes, scales):
    """fp4 pairs [E, N, K / 2] and their scales [E, N, K / 32], repacked as for SGLang's runner."""
    experts, n, half = codes.shape
    k = 2 * half
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(experts, n, k).transpose(0, 2, 1)
    blocks = nibbles.reshape(experts, k // 16, 16, n // 16, 16).transpose(0, 1, 3, 2, 4)
    ordered = blocks.reshape(experts, -1, 1024)[:, :, nibble_order()].astype(np.uint32)
    words = (ordered.reshape(experts, k // 16, -1, 8) << (4 * np.arange(8, dtype=np.uint32))).sum(
        -1
    )
    order, _ = get_scale_perms()
    turned = scales.transpose(0, 2, 1).reshape(-1, 64)[:, order]
    turned = turned.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(experts, k // FP4_GROUP, n)
    packed = torch.from_numpy(np.ascontiguousarray(words.astype(np.uint32).view(np.int32)))
    return packed, torch.from_numpy(np.ascontiguousarray(turned)).view(torch.float8_e8m0fnu)


def stacked(ape):
    """A ratio-4 compressor's position biases as SGLang keeps them."""
    halves = torch.chunk(torch.from_numpy(ape), 2, dim=-1)
    return torch.cat(halves, dim=0).view(ape.shape[0], -1).contiguous()


class Loaded:
    """`weights` are arrays by published name, of one rank of one; `config` is of the kernels.
    `is_wide`: a target's `wo_a` is expanded, as V4.1's always is."""

    def __init__(self, weights, config, is_wide=False):
        self.weights, self.config = weights, config
        self.is_v41 = config["kind"] == 1
        self.is_wide = is_wide or self.is_v41
        self.tensors = {}

    def all(self):
        put, weights = self.tensors.__setitem__, self.weights
        put("model.embed_tokens.weight", bf16(weights["embed.weight"]))
        put("model.norm.weight", bf16(weights["norm.weight"]))
        for part in ("fn", "base", "scale"):
            if f"hc_head_{part}" in weights:
                put(f"model.hc_head_{part}", torch.from_numpy(weights[f"hc_head_{part}"]))
        if "engram.token_map" in weights:
            # A tokenizer that knows fewer ids than the vocabulary has.
            put("model.engram_hasher.token_map", torch.from_numpy(weights["engram.token_map"]))
        for idx in range(self.config["num_layers"]):
            self.layer(idx)
        return self.tensors

    def draft(self):
        """What the draft has of its own; the target's embedding and head are attached to it."""
        put, weights = self.tensors.__setitem__, self.weights
        last = self.config["num_draft_stages"] - 1
        put(f"stages.{last}.norm.weight", bf16(weights[f"mtp.{last}.norm.weight"]))
        for part in ("fn", "base", "scale"):
            if f"mtp.{last}.hc_head_{part}" in weights:
                value = torch.from_numpy(weights[f"mtp.{last}.hc_head_{part}"])
                put(f"stages.{last}.hc_head_{part}", value)
        names = ("embed", "head") if self.is_v41 else ("markov_w1", "markov_w2")
        for name, place in zip(names, ("markov_w1", "markov_w2"), strict=True):
            weight = weights[f"mtp.{last}.markov_head.{name}.weight"]
            put(f"markov_head.{place}.weight", bf16(weight))
        for idx in range(last + 1):
            self.layer(idx, f"mtp.{idx}.", f"stages.{idx}.", is_stage=True)
        return self.tensors

    def layer(self, idx, mine=None, theirs=None, is_stage=False):
        mine, theirs = mine or f"layers.{idx}.", theirs or f"model.layers.{idx}."

        def get(name):
            return self.weights.get(mine + name)

        def put(name, tensor):
            self.tensors[theirs + name] = tensor

        def fp8(name, *parts):
            put(
                f"{name}.weight",
                torch.cat([e4m3(get(f"{p}.weight")).view(torch.uint8) for p in parts]).view(
                    torch.float8_e4m3fn
                ),
            )
            put(f"{name}.weight_scale_inv", torch.cat([powers(get(f"{p}.scale")) for p in parts]))

        for part in ("attn", "ffn"):
            for piece in ("fn", "base", "scale"):
                put(f"hc_{part}_{piece}", torch.from_numpy(get(f"hc_{part}_{piece}")))
        put("input_layernorm.weight", bf16(get("attn_norm.weight")))
        put("post_attention_layernorm.weight", bf16(get("ffn_norm.weight")))
        if is_stage:
            fp8("self_attn.wq_a", "attn.wq_a")
            fp8("self_attn.wkv", "attn.wkv")
        else:
            fp8("self_attn.wqkv_a", "attn.wq_a", "attn.wkv")
        put("self_attn.q_norm.weight", bf16(get("attn.q_norm.weight")))
        put("self_attn.kv_norm.weight", bf16(get("attn.kv_norm.weight")))
        fp8("self_attn.wq_b", "attn.wq_b")
        put("self_attn.attn_sink", torch.from_numpy(get("attn.attn_sink")))
        fp8("self_attn.wo_b", "attn.wo_b")
        codes, scales = e4m3(get("attn.wo_a.weight")), powers(get("attn.wo_a.scale"))
        block, groups = self.config["scale_block"], self.config["o_groups"]
        if self.is_wide or is_stage:
            wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
            put("self_attn.wo_a.weight", (codes.float() * wide).to(torch.bfloat16))
        else:
            put("self_attn.wo_a.weight", codes)
            put("self_attn.wo_a.weight_scale_inv", scales.view(groups, -1, scales.shape[1]))
        self.sources(get, put, fp8)
        self.experts(get, put, fp8)
        if get("engram.wkv.weight") is not None:
            fp8("engram.wkv", "engram.wkv")
            put("engram.q_weight", bf16(get("engram.q_weight")))
            put("engram.k_weight", bf16(get("engram.k_weight")))
            put("engram.embed.weight", e4m3(get("engram.embed.weight")))
            scale = torch.from_numpy(get("engram.embed.scale"))
            put("engram.embed.scale", scale.view(torch.float8_e8m0fnu))

    def sources(self, get, put, fp8):
        for owner in ("", "indexer."):
            name = f"attn.{owner}compressor"
            theirs = f"self_attn.{owner}compressor"
            if get(f"{name}.wkv.weight") is None:
                continue
            values, gates = (get(f"{name}.{part}.weight") for part in ("wkv", "wgate"))
            if self.is_v41:
                put(f"{theirs}.wkv.weight", bf16(values))
                if gates is not None:
                    put(f"{theirs}.wgate.weight", bf16(gates))
                put(f"{theirs}.norm.weight", bf16(get(f"{name}.norm.weight")))
                continue
            put(f"{theirs}.wkv_gate.weight", bf16(np.concatenate([values, gates])))
            put(f"{theirs}.norm.weight", bf16(get(f"{name}.norm.weight")).float())
            ape = get(f"{name}.ape")
            put(f"{theirs}.ape", stacked(ape) if ape.shape[0] == 4 else torch.from_numpy(ape))
        if get("attn.indexer.wk.weight") is not None:
            put("self_attn.indexer.wk.weight", bf16(get("attn.indexer.wk.weight")))
            put("self_attn.indexer.k_norm.weight", bf16(get("attn.indexer.k_norm.weight")))
        if get("attn.indexer.wq_b.weight") is not None:
            fp8("self_attn.indexer.wq_b", "attn.indexer.wq_b")
            weight = bf16(get("attn.indexer.weights_proj.weight"))
            put("self_attn.indexer.weights_proj.weight", weight)

    def experts(self, get, put, fp8):
        put("mlp.gate.weight", bf16(get("ffn.gate.weight")))
        if get("ffn.gate.tid2eid") is not None:
            put("mlp.topk.tid2eid", torch.from_numpy(get("ffn.gate.tid2eid")))
        for mine, theirs in (("bias", ""), ("bias_vl", "_vl")):
            bias = get(f"ffn.gate.{mine}")
            if bias is not None:
                put(f"mlp.gate.e_score_correction_bias{theirs}", torch.from_numpy(bias))
        both = [
            np.concatenate([get(f"ffn.experts.{w}.{part}") for w in ("w1", "w3")], 1)
            for part in ("weight", "scale")
        ]
        down = [get(f"ffn.experts.w2.{part}") for part in ("weight", "scale")]
        for name, (codes, scales) in (("w13", both), ("w2", down)):
            packed, turned = marlin(codes, scales)
            put(f"mlp.experts.{name}_weight", packed)
            put(f"mlp.experts.{name}_weight_scale", turned)
        fp8("mlp.shared_experts.gate_up_proj", "ffn.shared_experts.w1", "ffn.shared_experts.w3")
        fp8("mlp.shared_experts.down_proj", "ffn.shared_experts.w2")


# ------------------------------------------------------------------ caches

FIRST_PAGE = 1  # page 0 belongs to padding
NUM_REQUESTS = 4


class Caches:
    """SGLang's own pool for a model of ours, and copies between it and our pools. Our full page p
    is SGLang's p + FIRST_PAGE; a window's page lies somewhere else, and a request r is its r + 1.
    """

    def __init__(self, config, splits_index=False):
        self.config = config
        self.is_v41 = config["kind"] == 1
        self.splits_index = splits_index and self.is_v41
        self.page_size = page = config["page_size"]
        pages = self.num_pages = config["num_pages"] + FIRST_PAGE
        window_pages = pages + 2
        ratios = [layer["ratio"] for layer in config["layers"]]
        sources = [i for i, layer in enumerate(config["layers"]) if layer["kv_source"] == i]
        # The index keys' layout is the only thing that SGLang asks the platform for here.
        with mock.patch.object(deepseek_v4_memory_pool, "_is_hip", self.splits_index):
            self.pool = self.made(pages, window_pages, ratios, sources)
        self.window_of = {p: window_pages - 1 - p for p in range(config["num_pages"])}
        mapping = torch.zeros(pages * page, dtype=torch.int64)
        for own, window in self.window_of.items():
            first = (own + FIRST_PAGE) * page
            mapping[first : first + page] = window * page + torch.arange(page)
        self.pool.register_mapping(mapping)

    def made(self, pages, window_pages, ratios, sources):
        """SGLang's pool."""
        config, page = self.config, self.page_size
        size = (pages - 1) * page
        return DeepSeekV4TokenToKVPool(
            max_num_reqs=NUM_REQUESTS,
            swa_size=(window_pages - 1) * page,
            c4_size=size // 4,
            c128_size=size // 128,
            c4_state_pool_size=window_pages * config["state_ring"],
            c128_state_pool_size=0,
            page_size=page,
            swa_page_size=page,
            dtype=torch.float8_e4m3fn,
            c4_state_dtype=torch.float32,
            c128_state_dtype=torch.float32,
            qk_nope_head_dim=448,
            qk_rope_head_dim=64,
            indexer_head_dim=128,
            layer_num=config["num_layers"],
            device="cpu",
            enable_memory_saver=False,
            compression_ratios=ratios,
            kv_source_layers=sources if self.is_v41 else (),
            full_size=size,
            sliding_window=config["window"],
        )

    def places(self, name):
        """Pairs of views, of rows of one of our pools (given later) and where SGLang has them:
        (SGLang's array, [(ours, its)] of first-dimension places)."""
        kind, _, layer = name.rpartition(".")
        layer = int(layer)
        ratio = self.config["layers"][layer]["ratio"]
        pages = range(self.config["num_pages"])
        match kind:
            case "kv.swa":
                return self.pool.get_swa_raw_buffer(layer), self.window_of.items()
            case "kv.extra":
                buffer = self.pool.get_extra_key_buffer(layer).view(torch.uint8)
                return buffer, [(p, p + FIRST_PAGE) for p in pages]
            case "kv.state" | "kv.index_state":
                get = "attention" if kind == "kv.state" else "indexer"
                states = getattr(self.pool, f"get_{get}_compress_states")(layer)
                array = states.kv_score_buffer.kv_score
                ring = self.config["state_ring"] * (16 if ratio == 128 else 1)
                assert states.ring_size == ring
                rows = array[: array.shape[0] // ring * ring].view(-1, ring, array.shape[1])
                if ratio == 4:
                    return rows, self.window_of.items()
                return rows, [(r, r + 1) for r in range(self.config["max_batch"])]
        raise KeyError(name)

    def index_rows(self, name):
        """Of an index: SGLang's buffer, and a row's data and scale by slot."""
        layer = int(name.rpartition(".")[2])
        buffer = self.pool.get_index_k_with_scale_buffer(layer)
        data = 64 if self.is_v41 else 128
        entries = self.page_size // self.config["layers"][layer]["ratio"]

        def rows(array, slots):
            page, place = slots // 64, slots % 64
            columns = place[:, None] * data + np.arange(data)
            scales = 64 * data + place[:, None] * 4 + np.arange(4)
            return page[:, None], np.concatenate([columns, scales], 1)

        slots = np.arange(self.config["num_pages"] * entries)
        return buffer.numpy(), rows(None, slots), rows(None, slots + FIRST_PAGE * entries)

    def split_index_rows(self, name):
        """Of an index whose codes and scales are two buffers: (part, SGLang's array, our places,
        its places) of each. Entry i of a page of 64: code bytes of 32 values at [group, i], scales
        at [group, 16 x 4 transposed]."""
        layer = int(name.rpartition(".")[2])
        entries = self.page_size // self.config["layers"][layer]["ratio"]
        slots = np.arange(self.config["num_pages"] * entries)
        mine, theirs = slots, slots + FIRST_PAGE * entries
        scales = self.pool.get_index_k_fp4_scale_buffer(layer)
        codes = self.pool.get_index_k_fp4_payload_buffer(layer).view(scales.dtype)
        (page, place), (to_page, to) = (divmod(s[:, None], 64) for s in (mine, theirs))
        byte, group = np.arange(64), np.arange(4)
        turned = to % 16 * 4 + to // 16
        yield (
            f"{name} codes",
            codes.flatten(1).numpy(),
            (page, place * 64 + byte),
            (to_page, byte // 16 * 1024 + to * 16 + byte % 16),
        )
        yield (
            f"{name} scales",
            scales.flatten(1).numpy(),
            (page, 64 * 64 + place * 4 + group),
            (to_page, group * 64 + turned),
        )

    def pairs(self, pools):
        """(name, our rows, SGLang's array, places) of every pool of the target."""
        for name, own in pools.items():
            if name.startswith("mtp."):
                continue
            if name.startswith("kv.index.") and self.splits_index:
                for part, array, mine, theirs in self.split_index_rows(name):
                    yield part, own, array, mine, theirs
                continue
            if name.startswith("kv.index."):
                array, mine, theirs = self.index_rows(name)
                yield name, own, array, mine, theirs
                continue
            array, places = self.places(name)
            mine, theirs = (np.array(part) for part in zip(*places, strict=True))
            yield name, own, array.numpy(), mine, theirs

    def take(self, pools):
        """SGLang's caches as ours are now."""
        for _, own, array, mine, theirs in self.pairs(pools):
            array[theirs] = own[mine].reshape(array[theirs].shape)

    def differences(self, pools):
        """Names of pools whose rows differ, to the bit."""
        return [
            name
            for name, own, array, mine, theirs in self.pairs(pools)
            if not np.array_equal(
                array[theirs].reshape(own[mine].shape).view(np.uint8), own[mine].view(np.uint8)
            )
        ]

    def pages(self, table):
        """SGLang's full pages of a table of ours."""
        return np.where(table < 0, 0, table + FIRST_PAGE)
