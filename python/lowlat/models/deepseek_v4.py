"""DeepSeek-V4 and V4.1 as SGLang 0.5.23 holds them after its quantisation methods are done with
the loaded weights: names, shapes on one rank, dtypes and layouts of what the kernels read.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

V4, V41 = "deepseek_v4", "deepseek_v41"
MARLIN = "--moe-runner-backend marlin"
EXPERT_LAYOUT = "marlin"
PAGE_SIZE = 256  # tokens; SGLang's for these models
# Read where a model has it: the routing of image tokens.
OPTIONAL = ".gate.e_score_correction_bias_vl"
MARLIN_METHOD = "Mxfp4MarlinMoEMethod"
STREAMS = 4  # of the residual
MIXES = (2 + STREAMS) * STREAMS
FP4_GROUP = 32
MARLIN_TILE = 16
# The Marlin preparation pads a rank's expert width to a multiple of this.
MARLIN_WIDTH = 64

# torch's names, without "torch.", as the guard calls them.
DTYPES = {
    "bfloat16": "bf16",
    "float32": "f32",
    "float8_e4m3fn": "e4m3",
    "float8_e8m0fnu": "ue8m0",
    "int32": "i32",
    "int64": "i64",
    "int8": "i8",
    "uint8": "u8",
}


class Need(NamedTuple):
    """A tensor that the kernels read; as the guard's check of loaded tensors takes it."""

    name: str
    dtype: str
    shape: list[int]
    layout: str = "row_major"
    change: str | None = None


class Fact(NamedTuple):
    """A tensor that was loaded."""

    name: str
    dtype: str
    shape: list[int]
    layout: str


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Table:
    """The needs of one model on one of `tp_size` ranks; `config` has the published fields.

    `engram_rows` are the rows of an Engram layer's table that this rank holds, by layer: SGLang
    splits a table between hash columns, whose sizes are primes. `wide`: V4's `wo_a` is bf16 too.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tp_size: int,
        engram_rows: dict[int, int] | None = None,
        wide: bool = False,
    ) -> None:
        self.config = config
        self.tp_size = tp_size
        self.hidden = config["hidden_size"]
        self.is_v41 = config["model_type"] == V41
        self.is_wide = wide or self.is_v41
        self.engram_rows = engram_rows or {}
        self.block = config["quantization_config"]["weight_block_size"][0]

    def share(self, field: str) -> int:
        """A rank's part of a size that is split over the ranks."""
        return self.config[field] // self.tp_size

    def fp8(self, name: str, rows: int, columns: int) -> Iterator[Need]:
        """A matrix of square blocks, with one scale a block."""
        scales = [ceil_div(rows, self.block), ceil_div(columns, self.block)]
        yield Need(f"{name}.weight", "e4m3", [rows, columns])
        yield Need(f"{name}.weight_scale_inv", "f32", scales)

    def target(self) -> list[Need]:
        """What the target's steps read."""
        config = self.config
        vocab = self.share("vocab_size")
        needs = [
            Need("model.embed_tokens.weight", "bf16", [vocab, self.hidden]),
            Need("lm_head.weight", "bf16", [vocab, self.hidden]),
            Need("model.norm.weight", "bf16", [self.hidden]),
        ]
        if not self.is_v41:
            needs += self.collapse("model.hc_head")
        for layer in range(config["num_hidden_layers"]):
            needs += self.layer(f"model.layers.{layer}", layer)
        return needs

    def draft(self, stages: bool = False) -> list[Need]:
        """What the draft's sampler reads, and with `stages` its layers, the shared head and
        embedding apart: they are attached later."""
        vocab, rank = self.config["vocab_size"], self.config["dspark_markov_rank"]
        last = f"stages.{len(self.config['dspark_target_layer_ids']) - 1}"
        needs = [
            Need(f"{last}.norm.weight", "bf16", [self.hidden]),
            Need("markov_head.markov_w1.weight", "bf16", [vocab, rank]),
            Need("markov_head.markov_w2.weight", "bf16", [vocab, rank]),
        ]
        if not self.is_v41:
            needs += self.collapse(f"{last}.hc_head")
        for stage in range(len(self.config["dspark_target_layer_ids"]) if stages else 0):
            needs += self.stage(f"stages.{stage}")
        return needs

    def collapse(self, name: str) -> list[Need]:
        """V4's mix of the streams before the last norm."""
        return [
            Need(f"{name}_fn", "f32", [STREAMS, STREAMS * self.hidden]),
            Need(f"{name}_base", "f32", [STREAMS]),
            Need(f"{name}_scale", "f32", [1]),
        ]

    def stage(self, name: str) -> Iterator[Need]:
        """A layer of the draft: the window alone, `wo_a` in bf16, experts of its own."""
        config = self.config
        attention = f"{name}.self_attn"
        yield from self.mixing(name)
        yield from self.fp8(f"{attention}.wq_a", config["q_lora_rank"], self.hidden)
        yield from self.fp8(f"{attention}.wkv", config["head_dim"], self.hidden)
        yield from self.projections(attention, wide=True)
        count = config.get("dspark_n_routed_experts") or config["n_routed_experts"]
        yield from self.experts(f"{name}.mlp", count, is_hash=False)

    def layer(self, name: str, idx: int) -> Iterator[Need]:
        config = self.config
        yield from self.mixing(name)
        yield from self.attention(f"{name}.self_attn", idx)
        is_hash = not self.is_v41 and idx < config["num_hash_layers"]
        yield from self.experts(f"{name}.mlp", config["n_routed_experts"], is_hash)
        if idx in self.engram_rows:
            yield from self.engram(f"{name}.engram", idx)

    def mixing(self, name: str) -> Iterator[Need]:
        """The statistics of both sublayers, and their norms."""
        for part in ("attn", "ffn"):
            yield Need(f"{name}.hc_{part}_fn", "f32", [MIXES, STREAMS * self.hidden])
            yield Need(f"{name}.hc_{part}_base", "f32", [MIXES])
            yield Need(f"{name}.hc_{part}_scale", "f32", [3])
        yield Need(f"{name}.input_layernorm.weight", "bf16", [self.hidden])
        yield Need(f"{name}.post_attention_layernorm.weight", "bf16", [self.hidden])

    def projections(self, name: str, wide: bool) -> Iterator[Need]:
        """What attention has beside its first product; `wide`: `wo_a` in bf16."""
        config = self.config
        head, q_lora, o_lora = config["head_dim"], config["q_lora_rank"], config["o_lora_rank"]
        heads, groups = self.share("num_attention_heads"), self.share("o_groups")
        yield Need(f"{name}.attn_sink", "f32", [config["num_attention_heads"]])
        yield Need(f"{name}.q_norm.weight", "bf16", [q_lora])
        yield Need(f"{name}.kv_norm.weight", "bf16", [head])
        yield from self.fp8(f"{name}.wq_b", heads * head, q_lora)
        rows, columns = groups * o_lora, heads * head // groups
        if wide:
            yield Need(f"{name}.wo_a.weight", "bf16", [rows, columns])
        else:
            scales = [groups, o_lora // self.block, columns // self.block]
            yield Need(f"{name}.wo_a.weight", "e4m3", [rows, columns])
            yield Need(f"{name}.wo_a.weight_scale_inv", "f32", scales)
        yield from self.fp8(f"{name}.wo_b", self.hidden, rows)

    def attention(self, name: str, idx: int) -> Iterator[Need]:
        config = self.config
        head = config["head_dim"]
        yield from self.fp8(f"{name}.wqkv_a", config["q_lora_rank"] + head, self.hidden)
        yield from self.projections(name, wide=self.is_wide)
        ratio = config["compress_ratios"][idx]
        if self.is_v41:
            yield from self.sources(name, idx, ratio)
        elif ratio:
            yield from self.compressor(f"{name}.compressor", ratio, head)
            if ratio == 4:
                yield from self.indexer(f"{name}.indexer")
                size = config["index_head_dim"]
                yield from self.compressor(f"{name}.indexer.compressor", ratio, size)

    def compressor(self, name: str, ratio: int, size: int) -> Iterator[Need]:
        """V4's: at ratio 4 two overlapping windows, so twice the columns."""
        columns = size * (2 if ratio == 4 else 1)
        yield Need(f"{name}.ape", "f32", [ratio, columns])
        yield Need(f"{name}.wkv_gate.weight", "bf16", [2 * columns, self.hidden])
        yield Need(f"{name}.norm.weight", "f32", [size])

    def indexer(self, name: str) -> Iterator[Need]:
        heads, size = self.config["index_n_heads"], self.config["index_head_dim"]
        yield from self.fp8(f"{name}.wq_b", heads * size, self.config["q_lora_rank"])
        yield Need(f"{name}.weights_proj.weight", "bf16", [heads, self.hidden])

    def sources(self, name: str, idx: int, ratio: int) -> Iterator[Need]:
        """V4.1's: a layer compresses, selects, does both or neither."""
        head, size = self.config["head_dim"], self.config["index_head_dim"]
        if idx in self.config["kv_source_layer_ids"]:
            yield Need(f"{name}.compressor.wkv.weight", "bf16", [head, self.hidden])
            yield Need(f"{name}.compressor.norm.weight", "bf16", [head])
            if ratio == 2:
                yield Need(f"{name}.compressor.wgate.weight", "bf16", [head, self.hidden])
        if idx in self.config["index_source_layer_ids"]:
            yield from self.indexer(f"{name}.indexer")
        if idx in self.config["kv_source_layer_ids"]:
            yield Need(f"{name}.indexer.wk.weight", "bf16", [size, head])
            yield Need(f"{name}.indexer.k_norm.weight", "bf16", [size])

    def experts(self, name: str, count: int, is_hash: bool) -> Iterator[Need]:
        config = self.config
        width = self.share("moe_intermediate_size")
        yield Need(f"{name}.gate.weight", "bf16", [count, self.hidden])
        if is_hash:
            table = [config["vocab_size"], config["num_experts_per_tok"]]
            yield Need(f"{name}.topk.tid2eid", "i32", table)
        else:
            yield Need(f"{name}.gate.e_score_correction_bias", "f32", [count])
        yield from self.fp8(f"{name}.shared_experts.gate_up_proj", 2 * width, self.hidden)
        yield from self.fp8(f"{name}.shared_experts.down_proj", self.hidden, width)
        padded = ceil_div(width, MARLIN_WIDTH) * MARLIN_WIDTH
        for part, rows, columns in (
            ("w13", 2 * padded, self.hidden),
            ("w2", self.hidden, padded),
        ):
            codes = [count, columns // MARLIN_TILE, 2 * rows]
            scales = [count, columns // FP4_GROUP, rows]
            yield Need(f"{name}.experts.{part}_weight", "i32", codes, "marlin", MARLIN)
            yield Need(f"{name}.experts.{part}_weight_scale", "ue8m0", scales, "marlin", MARLIN)

    def engram(self, name: str, idx: int) -> Iterator[Need]:
        config = self.config
        rows, size = self.engram_rows[idx], config["engram_head_dim"]
        columns = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"] * size
        yield Need(f"{name}.embed.weight", "e4m3", [rows, size])
        yield Need(f"{name}.embed.scale", "ue8m0", [rows, size // FP4_GROUP])
        yield from self.fp8(f"{name}.wkv", (1 + STREAMS) * self.hidden, columns)
        yield Need(f"{name}.q_weight", "bf16", [STREAMS, self.hidden])
        yield Need(f"{name}.k_weight", "bf16", [STREAMS, self.hidden])


def engram_rows(model: Any) -> dict[int, int]:
    """The rows of each Engram table that this rank holds, by layer."""
    layers = enumerate(model.model.layers)
    tables = ((idx, getattr(layer, "engram", None)) for idx, layer in layers)
    return {idx: int(table.embed.rows) for idx, table in tables if table is not None}


def expands_wo_a(tensors: Iterable[tuple[str, Any]]) -> bool:
    """Whether the loaded target's ``wo_a`` is bf16: V4.1's always, V4's on Hopper unless SGLang is
    told otherwise. `tensors` come with their names."""
    return any(
        name.endswith("self_attn.wo_a.weight") and str(tensor.dtype) == "torch.bfloat16"
        for name, tensor in tensors
    )


def facts(model: Any, names: Iterable[str]) -> list[Fact]:
    """Those of the named tensors that the loaded model has, as they lie."""
    wanted = set(names)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = dict(model.named_modules())
    found = []
    for name, tensor in tensors.items():
        if name not in wanted:
            continue
        owner, _, _ = name.rpartition(".")
        dtype = str(tensor.dtype).removeprefix("torch.")
        layout = layout_of(modules.get(owner), tensor)
        found.append(Fact(name, DTYPES.get(dtype, dtype), list(tensor.shape), layout))
    return found


def layout_of(owner: Any, tensor: Any) -> str:
    """The experts' method decides how they lie; the rest is row-major or some strided view."""
    method = type(getattr(owner, "quant_method", None)).__name__
    if "MoE" in method:
        return "marlin" if method == MARLIN_METHOD else method
    return "row_major" if tensor.is_contiguous() else "strided"
