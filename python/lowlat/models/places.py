"""Where the tensors of the kernels' C ABI lie among SGLang's, for DeepSeek-V4 and V4.1: most of
them as they are or as rows of a fused one; the rest is re-laid, and counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowlat.models.deepseek_v4 import DTYPES
from lowlat.reasons import refusal

UE8M0_BIAS = 127
# The head and the embedding of the draft are the target's, which are attached after the build.
HEAD, EMBEDDING = "head.weight", "embed.weight"

ATTENTION = {
    "wq_b.weight": "wq_b.weight",
    "wq_b.scale": "wq_b.weight_scale_inv",
    "wo_a.weight": "wo_a.weight",
    "wo_a.scale": "wo_a.weight_scale_inv",
    "wo_b.weight": "wo_b.weight",
    "wo_b.scale": "wo_b.weight_scale_inv",
    "q_norm.weight": "q_norm.weight",
    "kv_norm.weight": "kv_norm.weight",
    "attn_sink": "attn_sink",
    "compressor.ape": "compressor.ape",
    "compressor.norm.weight": "compressor.norm.weight",
    "indexer.compressor.ape": "indexer.compressor.ape",
    "indexer.compressor.norm.weight": "indexer.compressor.norm.weight",
    "indexer.wk.weight": "indexer.wk.weight",
    "indexer.k_norm.weight": "indexer.k_norm.weight",
    "indexer.wq_b.weight": "indexer.wq_b.weight",
    "indexer.wq_b.scale": "indexer.wq_b.weight_scale_inv",
    "indexer.weights_proj.weight": "indexer.weights_proj.weight",
}
FFN = {
    "gate.weight": "gate.weight",
    "gate.bias": "gate.e_score_correction_bias",
    "gate.bias_vl": "gate.e_score_correction_bias_vl",
    "gate.tid2eid": "topk.tid2eid",
    "experts.w13.weight": "experts.w13_weight",
    "experts.w13.scale": "experts.w13_weight_scale",
    "experts.w2.weight": "experts.w2_weight",
    "experts.w2.scale": "experts.w2_weight_scale",
    "shared_experts.w2.weight": "shared_experts.down_proj.weight",
    "shared_experts.w2.scale": "shared_experts.down_proj.weight_scale_inv",
}
ENGRAM = {
    "wkv.weight": "wkv.weight",
    "wkv.scale": "wkv.weight_scale_inv",
    "q_weight": "q_weight",
    "k_weight": "k_weight",
    "embed.weight": "embed.weight",
    "embed.scale": "embed.scale",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
MODEL = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "engram.token_map": "model.engram_hasher.token_map",
}
# Rows of a fused matrix: its name, and which part of how many equal ones it is, or None where the
# parts differ: the first one's rows come first, the other's last.
FUSED = {
    "attn.wq_a": ("self_attn.wqkv_a", None),
    "attn.wkv": ("self_attn.wqkv_a", None),
    "ffn.shared_experts.w1": ("mlp.shared_experts.gate_up_proj", 0),
    "ffn.shared_experts.w3": ("mlp.shared_experts.gate_up_proj", 1),
}


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the kernels: SGLang's tensor, `rows` of its first dimension (None: all), and
    what must be done to it, if anything."""

    name: str
    rows: slice | None = None
    relay: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """A tensor as the kernels take it; `relaid` when it is a copy of ours."""

    tensor: Any
    dtype: str
    relaid: bool


def powers(tensor: Any) -> Any:
    """fp32 scales, which are powers of two, as their ue8m0 codes."""
    mantissa, exponent = tensor.frexp()
    codes = exponent + (UE8M0_BIAS - 1)
    if not bool(((mantissa == 0.5) & (codes >= 0) & (codes <= 254)).all()):
        raise refusal(
            "tensor_dtype",
            "a scale is no power of two; these kernels read scales of ue8m0",
            "the published checkpoint",
        )
    return codes.byte()


def halved(tensor: Any) -> Any:
    """fp32 gains, which are bf16 values, as bf16."""
    out = tensor.bfloat16()
    if not bool((out.float() == tensor).all()):
        raise refusal(
            "tensor_dtype",
            "a compressor's gains are no bf16 values; these kernels read bf16",
            "the published checkpoint",
        )
    return out


def unstacked(tensor: Any) -> Any:
    """SGLang stacks the halves of a ratio-4 compressor's position biases; back side by side."""
    ratio, columns = tensor.shape
    stacked = tensor.reshape(2 * ratio, columns // 2)
    return tensor.new_empty(ratio, columns).copy_(
        stacked.reshape(2, ratio, columns // 2).transpose(0, 1).reshape(ratio, columns)
    )


class Places:
    """Looks the kernels' tensors up in a rank's loaded `tensors`, by the model's `config` (the
    dict of ``_kernels.HostedModel``)."""

    def __init__(self, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.tensors = tensors
        self.config = config

    def find(self, spec: Mapping[str, Any]) -> Bound:
        """The tensor of `spec`, one of ``HostedModel.tensors()``."""
        place = self.place(spec["name"], spec["shape"])
        tensor = self.tensors.get(place.name)
        if tensor is None:
            raise refusal("tensor_missing", f"{place.name} is not among the loaded tensors")
        if place.rows is not None:
            tensor = tensor[place.rows]
        relaid = False
        if place.relay is not None:
            whole = place.relay(tensor)
            tensor, relaid = whole, whole is not tensor
        seen = DTYPES.get(str(tensor.dtype).removeprefix("torch."), str(tensor.dtype))
        if spec["dtype"] == "ue8m0" and seen == "f32":
            tensor, seen, relaid = powers(tensor), "ue8m0", True
        elif spec["dtype"] == "ue8m0" and seen == "u8":
            seen = "ue8m0"
        elif spec["dtype"] == "bf16" and seen == "f32":
            tensor, seen, relaid = halved(tensor), "bf16", True
        if not tensor.is_contiguous():
            tensor, relaid = tensor.contiguous(), True
        return Bound(
            tensor.view(*spec["shape"]) if same_size(tensor, spec) else tensor, seen, relaid
        )

    def place(self, name: str, shape: list[int]) -> Place:
        if name in MODEL:
            relay = self.whole_map if name == "engram.token_map" else None
            return Place(MODEL[name], relay=relay)
        if name.startswith("hc_head_"):
            return Place(f"model.{name}")
        if name.startswith("mtp."):
            return self.draft_place(name, shape)
        _, layer, rest = name.split(".", 2)
        return self.layer_place(f"model.layers.{layer}", int(layer), rest, shape)

    def draft_place(self, name: str, shape: list[int]) -> Place:
        stage, rest = name.removeprefix("mtp.").split(".", 1)
        match rest:
            case "markov_head.embed.weight" | "markov_head.markov_w1.weight":
                return Place("markov_head.markov_w1.weight")
            case "markov_head.head.weight" | "markov_head.markov_w2.weight":
                return Place("markov_head.markov_w2.weight", self.share(self.config["vocab"]))
        name, part = f"stages.{stage}", rest.partition(".")[0]
        if part not in ("attn", "ffn"):
            return Place(f"{name}.{LAYER.get(rest, rest)}")
        # Of attention's first products each has a matrix of its own.
        for matrix in ("wq_a", "wkv"):
            if rest.startswith(f"attn.{matrix}."):
                last = "weight" if rest.endswith(".weight") else "weight_scale_inv"
                return Place(f"{name}.self_attn.{matrix}.{last}")
        return self.layer_place(name, int(stage), rest, shape)

    def layer_place(self, layer: str, idx: int, rest: str, shape: list[int]) -> Place:
        owner, _, last = rest.rpartition(".")
        if owner in FUSED:
            return self.fused(layer, owner, last, shape)
        part, _, inner = rest.partition(".")
        if part == "attn":
            return self.attention_place(f"{layer}.self_attn", idx, inner, shape)
        if part == "ffn":
            name = f"{layer}.mlp.{FFN[inner]}"
            if inner == "gate.bias_vl" and name not in self.tensors:
                # A model that takes no images has no bias of theirs, and no such rows.
                name = f"{layer}.mlp.{FFN['gate.bias']}"
            return Place(name)
        if part == "engram":
            return Place(f"{layer}.engram.{ENGRAM[inner]}")
        return Place(f"{layer}.{LAYER.get(rest, rest)}")

    def attention_place(self, owner: str, idx: int, inner: str, shape: list[int]) -> Place:
        if inner == "attn_sink":
            return Place(f"{owner}.attn_sink", self.share(self.config["num_heads"]))
        compressor, _, last = inner.rpartition("compressor.")
        matrix = last.removesuffix(".weight")
        if matrix in ("wkv", "wgate") and inner != f"{matrix}.weight":
            separate = f"{owner}.{inner}"
            if separate in self.tensors:
                return Place(separate)
            rows = shape[0]
            part = slice(0, rows) if matrix == "wkv" else slice(rows, 2 * rows)
            return Place(f"{owner}.{compressor}compressor.wkv_gate.weight", part)
        if last == "ape" and self.config["layers"][idx]["ratio"] == 4:
            return Place(f"{owner}.{ATTENTION[inner]}", relay=unstacked)
        return Place(f"{owner}.{ATTENTION[inner]}")

    def fused(self, layer: str, owner: str, last: str, shape: list[int]) -> Place:
        matrix, part = FUSED[owner]
        name = f"{layer}.{matrix}.{'weight' if last == 'weight' else 'weight_scale_inv'}"
        rows = shape[0]
        first = owner == "attn.wq_a" if part is None else part == 0
        return Place(name, slice(0, rows) if first else slice(-rows, None))

    def share(self, whole: int) -> slice:
        """This rank's rows of something that every rank holds whole."""
        rows = whole // self.config["tp_size"]
        return slice(self.config["tp_rank"] * rows, (self.config["tp_rank"] + 1) * rows)

    def whole_map(self, tensor: Any) -> Any:
        """The token map for every id of the vocabulary: a tokenizer may know fewer."""
        vocab = self.config["vocab"]
        if tensor.shape[0] == vocab:
            return tensor
        out = tensor.new_zeros(vocab)
        count = min(vocab, tensor.shape[0])
        out[:count] = tensor[:count]
        return out


def same_size(tensor: Any, spec: Mapping[str, Any]) -> bool:
    count = 1
    for size in spec["shape"]:
        count *= size
    return tensor.numel() == count
