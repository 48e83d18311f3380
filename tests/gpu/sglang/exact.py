"""What a computation in float64 says of rows that the plugin and SGLang's own forward both ran.

    PYTHONPATH=tests/python python exact.py --model DIR --kept DIR [--prompt 300] [--moved]

DIR of the model is engine.py's, of V4.1; DIR of what was kept is what a run of its with --eager 1
left under --out, with the same --prompt. Needs lowlat, numpy, ml_dtypes and torch, no GPU: the
weights are hashes of their places (dummy_weights.py), of which only what is used is made. Prints,
of each layer's features and of the logits, how far both are from float64 and from each other; with
--moved also how far float64 is from itself when its embeddings are a rounding beside. Context that
both read, the prompt's, is SGLang's.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from dummy_weights import FP4_SCALE, FP8_SCALE, UE8M0_OF_ONE, fill
from engine import prompts_of
from lowlat import _dispatch
from oracle.formats import bf16_value
from oracle.model import NUM_STREAMS
from oracle.models import make_model
from oracle.moe import mxfp4

FP4_GROUP = 32


class Weights:
    """Tensors of a V4.1 by their published names, made when they are asked for."""

    def __init__(self, config: dict) -> None:
        self.config = c = config
        hidden, heads, width = c["hidden"], c["num_heads"], c["moe_intermediate"]
        groups = c["o_groups"]
        fused = c["q_lora"] + c["head_dim"], hidden
        both = 2 * width, hidden
        # Of a layer: SGLang's name, dtype, the first row of that tensor, rows, columns.
        self.parts = {
            "attn.wq_a": ("self_attn.wqkv_a", "e4m3", 0, c["q_lora"], fused[1]),
            "attn.wkv": ("self_attn.wqkv_a", "e4m3", c["q_lora"], c["head_dim"], fused[1]),
            "attn.wq_b": ("self_attn.wq_b", "e4m3", 0, heads * c["head_dim"], c["q_lora"]),
            "attn.wo_a": (
                "self_attn.wo_a",
                "e4m3",
                0,
                groups * c["o_lora"],
                heads * c["head_dim"] // groups,
            ),
            "attn.wo_b": ("self_attn.wo_b", "e4m3", 0, hidden, groups * c["o_lora"]),
            "attn.compressor.wkv": ("self_attn.compressor.wkv", "bf16", 0, c["head_dim"], hidden),
            "attn.compressor.wgate": (
                "self_attn.compressor.wgate",
                "bf16",
                0,
                c["head_dim"],
                hidden,
            ),
            "attn.indexer.wk": ("self_attn.indexer.wk", "bf16", 0, c["index_dim"], c["head_dim"]),
            "attn.indexer.wq_b": (
                "self_attn.indexer.wq_b",
                "e4m3",
                0,
                c["index_heads"] * c["index_dim"],
                c["q_lora"],
            ),
            "attn.indexer.weights_proj": (
                "self_attn.indexer.weights_proj",
                "bf16",
                0,
                c["index_heads"],
                hidden,
            ),
            "ffn.gate": ("mlp.gate", "bf16", 0, c["num_experts"], hidden),
            "ffn.shared_experts.w1": ("mlp.shared_experts.gate_up_proj", "e4m3", 0, width, both[1]),
            "ffn.shared_experts.w3": (
                "mlp.shared_experts.gate_up_proj",
                "e4m3",
                width,
                width,
                both[1],
            ),
            "ffn.shared_experts.w2": ("mlp.shared_experts.down_proj", "e4m3", 0, hidden, width),
        }

    def __getitem__(self, name: str) -> np.ndarray:
        c = self.config
        if name == "head.weight":
            return made("lm_head.weight", "bf16", 0, c["vocab"], c["hidden"])
        if "norm" in name:
            sizes = {"q_norm": c["q_lora"], "kv_norm": c["head_dim"], "k_norm": c["index_dim"]}
            sizes["compressor.norm"] = c["head_dim"]
            size = next((sizes[part] for part in sizes if part in name), c["hidden"])
            return np.full(size, 0x3F80, np.uint16)
        _, layer, rest = name.split(".", 2)
        layer = f"model.layers.{layer}."
        if rest.startswith("hc_"):
            kind = rest.rsplit("_", 1)[1]
            rows = {"fn": (2 + NUM_STREAMS) * NUM_STREAMS, "base": 24, "scale": 3}[kind]
            columns = NUM_STREAMS * c["hidden"] if kind == "fn" else None
            return made(layer + rest, "f32", 0, rows, columns)
        if rest == "attn.attn_sink":
            return np.zeros(c["num_heads"], np.float32)
        if rest in ("ffn.gate.bias", "ffn.gate.bias_vl"):
            return made(
                f"{layer}mlp.gate.e_score_correction_bias", "f32", 0, c["num_experts"], None
            )
        part, kind = rest.rsplit(".", 1)
        theirs, dtype, first, rows, columns = self.parts[part]
        if kind == "scale":
            block = c["scale_block"]
            code = UE8M0_OF_ONE + round(np.log2(FP8_SCALE))
            return np.full((-(-rows // block), -(-columns // block)), code, np.uint8)
        return made(f"{layer}{theirs}.weight", dtype, first, rows, columns)

    def embedding(self, token: int) -> np.ndarray:
        return made("model.embed_tokens.weight", "bf16", token, 1, self.config["hidden"])[0]

    def expert(self, prefix: str, which: str, idx: int) -> np.ndarray:
        """One expert's w1, w3 or w2, float64 [N, K]."""
        layer = f"model.{prefix}mlp.experts."
        hidden, width = self.config["hidden"], self.config["moe_intermediate"]
        if which == "w2":
            name, first, rows, columns = "w2_weight", idx * hidden, hidden, width
        else:
            first = (2 * idx + (which == "w3")) * width
            name, rows, columns = "w13_weight", width, hidden
        codes = made(layer + name, "fp4", first, rows, columns // 2)
        return mxfp4(codes, np.full((rows, columns // FP4_GROUP), FP4_SCALE, np.uint8))


DTYPES = {
    "bf16": (torch.bfloat16, torch.int16, np.uint16),
    "e4m3": (torch.float8_e4m3fn, torch.uint8, np.uint8),
    "fp4": (torch.int8, torch.uint8, np.uint8),
    "f32": (torch.float32, torch.float32, np.float32),
}


def made(name: str, dtype: str, first: int, rows: int, columns: int | None) -> np.ndarray:
    """Rows of a tensor, or with no columns its values."""
    kind, bits, array = DTYPES[dtype]
    shape = [rows] if columns is None else [rows, columns]
    tensor = torch.empty(shape, dtype=kind)
    fill(name, tensor, first * (columns or 1))
    return tensor.view(bits).numpy().view(array)


class Experts:
    """A stack of experts, each made when it is used."""

    def __init__(self, weights: Weights, prefix: str, which: str) -> None:
        self.weights, self.prefix, self.which = weights, prefix, which
        hidden, width = weights.config["hidden"], weights.config["moe_intermediate"]
        n, k = (hidden, width) if which == "w2" else (width, hidden)
        self.shape = weights.config["num_experts"], n, k
        self.last: tuple = (None, None)

    def __getitem__(self, place: tuple) -> np.ndarray:
        idx, *rest = place
        if self.last[0] != idx:
            self.last = idx, self.weights.expert(self.prefix, self.which, int(idx))
        return self.last[1][tuple(rest)]


def exact(config: dict, weights: Weights, moved: bool):
    """The oracle of the whole model over these weights."""
    model = make_model(config, weights, 1)

    def fp4(name: str) -> Experts:
        prefix, which = name.split("ffn.experts.")
        return Experts(weights, prefix, which)

    def embed(tokens: np.ndarray) -> np.ndarray:
        rows = np.stack([weights.embedding(int(token)) for token in tokens])
        if moved:
            rows = a_rounding_beside(rows)
        return np.repeat(bf16_value(rows)[:, None, :], NUM_STREAMS, axis=1)

    model.fp4, model.embed = fp4, embed
    return model


def a_rounding_beside(bits: np.ndarray) -> np.ndarray:
    """As lowlat_few_gpus.py's: one value in sixteen is its neighbour."""
    random = np.random.default_rng(1).integers(0, 32, bits.shape)
    step = (random == 0).astype(np.int64) - (random == 1)
    return (bits + np.where((bits & 0x7FFF) > 1, step, 0)).astype(np.uint16)


def relative(one: np.ndarray, other: np.ndarray) -> float:
    """The median over rows of |one - other| / |other|."""
    return float(np.median(np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--kept", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--bias", type=float, default=4.0)
    parser.add_argument("--moved", action="store_true")
    args = parser.parse_args()
    os.environ["LOWLAT_TEST_BIAS"] = str(args.bias)
    config = json.loads(_dispatch.kernel_config((args.model / "config.json").read_text()))
    count = config["num_layers"]
    config |= {"num_draft_stages": count, "draft_target_layers": list(range(count))}
    weights = Weights(config)
    kept = dict(np.load(args.kept / "step0.npz"))
    (prompt,) = prompts_of(1, args.prompt, config["vocab"] - 1000)
    rows = len(kept["ids"])
    if int(kept["positions"][0]) != args.prompt:
        print(f"the rows that were kept begin at {kept['positions'][0]}, not at the prompt's end")
        return 1
    tokens = np.array([*prompt, *kept["ids"]])
    runs = {"float64": exact(config, weights, False).run(tokens)}
    if args.moved:
        runs["moved float64"] = exact(config, weights, True).run(tokens)
    found = {
        name: (
            trace.features[-rows:].reshape(rows, count, -1),
            trace.logits[-rows:],
        )
        for name, trace in runs.items()
    }
    for name in ("ours", "sglang", "moved"):
        layers, logits = (kept[f"{name}_{part}"].view(np.uint16) for part in ("layers", "logits"))
        found[name] = bf16_value(layers), bf16_value(logits)
    pairs = [("ours", "float64"), ("sglang", "float64"), ("ours", "sglang"), ("moved", "sglang")]
    if args.moved:
        pairs.append(("moved float64", "float64"))
    print("layer  " + "  ".join(f"{one} - {other}" for one, other in pairs))
    for layer in range(count):
        values = (relative(found[a][0][:, layer], found[b][0][:, layer]) for a, b in pairs)
        print(f"{layer:5}  " + "  ".join(f"{value:.5f}" for value in values))
    values = (relative(found[a][1], found[b][1]) for a, b in pairs)
    print("logits " + "  ".join(f"{value:.5f}" for value in values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
