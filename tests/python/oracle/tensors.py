"""The weights of a V4 checkpoint, from the table of published tensors: for models without files.

Experts are stacked, as the kernels are given them.
"""

HC_ROWS = 24
HEAD_DIM, INDEX_DIM = 512, 128


def v4_weights(config):
    """(name, dtype, whole shape, dimension that the ranks split or -1) of every weight.

    dtype is "bf16", "f32", "i32", "e4m3", "ue8m0" or "fp4" (whose last dimension counts bytes).
    """
    hidden, vocab, q_lora = (config[n] for n in ("hidden", "vocab", "q_lora"))
    heads, groups, o_lora = (config[n] for n in ("num_heads", "o_groups", "o_lora"))
    inner, block = config["moe_intermediate"], config["scale_block"]
    stages = config["num_draft_stages"]

    def fp8(name, rows, columns, split=-1):
        yield name + ".weight", "e4m3", (rows, columns), split
        yield name + ".scale", "ue8m0", (rows // block, columns // block), split

    def fp4(name, experts, rows, columns, split):
        yield name + ".weight", "fp4", (experts, rows, columns // 2), split
        yield name + ".scale", "ue8m0", (experts, rows, columns // 32), split

    def hyper(name, rows, scales):
        yield name + "_fn", "f32", (rows, 4 * hidden), -1
        yield name + "_base", "f32", (rows,), -1
        yield name + "_scale", "f32", (scales,), -1

    def compressor(name, ratio, width, dim):
        yield name + "wkv.weight", "bf16", (width, hidden), -1
        yield name + "wgate.weight", "bf16", (width, hidden), -1
        yield name + "ape", "f32", (ratio, width), -1
        yield name + "norm.weight", "bf16", (dim,), -1

    def layer(prefix, experts, hashed):
        yield from hyper(prefix + "hc_attn", HC_ROWS, 3)
        yield from hyper(prefix + "hc_ffn", HC_ROWS, 3)
        yield prefix + "attn_norm.weight", "bf16", (hidden,), -1
        yield prefix + "ffn_norm.weight", "bf16", (hidden,), -1
        attn, ffn = prefix + "attn.", prefix + "ffn."
        yield from fp8(attn + "wq_a", q_lora, hidden)
        yield from fp8(attn + "wkv", HEAD_DIM, hidden)
        yield attn + "q_norm.weight", "bf16", (q_lora,), -1
        yield attn + "kv_norm.weight", "bf16", (HEAD_DIM,), -1
        yield from fp8(attn + "wq_b", heads * HEAD_DIM, q_lora, split=0)
        yield attn + "attn_sink", "f32", (heads,), 0
        yield from fp8(attn + "wo_a", groups * o_lora, heads // groups * HEAD_DIM, split=0)
        yield from fp8(attn + "wo_b", hidden, groups * o_lora, split=1)
        yield ffn + "gate.weight", "bf16", (experts, hidden), -1
        if hashed:
            yield ffn + "gate.tid2eid", "i32", (vocab, config["experts_per_token"]), -1
        else:
            yield ffn + "gate.bias", "f32", (experts,), -1
        for name, rows, columns, split in (
            ("w1", inner, hidden, 1),
            ("w3", inner, hidden, 1),
            ("w2", hidden, inner, 2),
        ):
            yield from fp4(f"{ffn}experts.{name}", experts, rows, columns, split)
            yield from fp8(f"{ffn}shared_experts.{name}", rows, columns, split - 1)

    yield "embed.weight", "bf16", (vocab, hidden), 0
    yield "head.weight", "bf16", (vocab, hidden), 0
    yield "norm.weight", "bf16", (hidden,), -1
    yield from hyper("hc_head", 4, 1)
    for idx in range(config["num_layers"]):
        prefix, plan = f"layers.{idx}.", config["layers"][idx]
        yield from layer(prefix, config["num_experts"], plan["hash_gate"])
        core, indexer = prefix + "attn.compressor.", prefix + "attn.indexer."
        if plan["ratio"] == 4:  # two halves: for the next entry and for its own
            yield from compressor(core, 4, 2 * HEAD_DIM, HEAD_DIM)
            yield from compressor(indexer + "compressor.", 4, 2 * INDEX_DIM, INDEX_DIM)
            yield from fp8(indexer + "wq_b", config["index_heads"] * INDEX_DIM, q_lora)
            yield indexer + "weights_proj.weight", "bf16", (config["index_heads"], hidden), -1
        elif plan["ratio"] == 128:
            yield from compressor(core, 128, HEAD_DIM, HEAD_DIM)
    if stages == 0:
        return
    for stage in range(stages):
        yield from layer(f"mtp.{stage}.", config["draft_experts"], False)
    last, rank = f"mtp.{stages - 1}.", config["markov_rank"]
    yield from fp8("mtp.0.main_proj", hidden, stages * hidden)
    yield "mtp.0.main_norm.weight", "bf16", (hidden,), -1
    yield last + "norm.weight", "bf16", (hidden,), -1
    yield from hyper(last + "hc_head", 4, 1)
    yield last + "markov_head.markov_w1.weight", "bf16", (vocab, rank), -1
    yield last + "markov_head.markov_w2.weight", "bf16", (vocab, rank), 0
