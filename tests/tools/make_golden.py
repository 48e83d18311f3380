"""Writes tests/golden: small cases of every operation, for the tests of all three languages.

    python make_golden.py [--out DIR]        (`make golden`)

    <case>/case.json        {"op", "models", "seed", "inputs": [array], "outputs": [array]}
    <case>/in_<name>.bin    raw little-endian, row-major
    <case>/out_<name>.bin   what platform `reference` gives

A case is named by its operation where V4.1 has it; what V4 alone has, or means otherwise, ends in
_v4. Every model of "models" gives the same outputs.

An array is {"name", "dtype" (u8, i32, i64, f32, bf16), "shape", "file", "fnv1a64"}; an output has
"bounds" too: platform to "bitwise" or "metric <= bound" (rel_l2, max_ulp, max_abs, max_rel; "values
rel_l2": of index keys of 128 e4m3 codes and an fp32 scale), as declared. The bytes depend on the
seed and the operation's name alone: writing again gives the same, so a difference is a change of
meaning.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))

import oracle  # noqa: E402
from oracle import run as kernels  # noqa: E402
from oracle.cases import make, one  # noqa: E402
from oracle.compare import TERM  # noqa: E402
from oracle.formats import bf16_bits, bf16_value  # noqa: E402

SEED = 20260801
DTYPES = {"uint8": "u8", "int32": "i32", "int64": "i64", "float32": "f32", "uint16": "bf16"}

# Small shapes; a row or two of each case is made awkward below.
V41 = {
    "hc_stats": dict(T=3, H=64),
    "hc_combine_norm": dict(T=3, H=96),
    "hc_post": dict(T=3, H=96),
    "rms_norm": dict(T=4, H=96),
    "rank_sum": dict(R=4, T=3, H=96),
    "block_linear": dict(T=4, N=96, K=128),
    "lm_head": dict(T=3, V=77, H=96),
    "rope": dict(T=6, h=2, D=128, yarn=1),
    "kv_pack": dict(T=6),
    "kv_unpack": dict(T=5),
    "sparse_attention": dict(T=4, h=2, S=60, s=40, E=40, n=30),
    "compress": dict(L=7, H=32, ratio=2),
    "index_query": dict(T=4, h=2),
    "index_key": dict(T=4),
    "index_select": dict(T=4, h=2, N=50, k=16, M=4),
    "candidate_blocks": dict(T=4, N=70, k=4),
    "gate": dict(T=4, H=64, E=17),
    "experts": dict(T=4, E=6, H=64, I=32),
    "engram_hash": dict(T=8, V=60),
    "engram_lookup": dict(T=2, rows=60, D=32),
    "engram_apply": dict(T=3, H=32, D=4),
    "markov_draft": dict(B=4, g=3, V=64, R=16),
    "accept": dict(B=6, g=3, V=32),
}
# Of operations that mean the same in both models the cases above are V4's too.
V4 = {
    "hc_stats_v4": ("hc_stats", dict(T=3, H=64)),
    "hc_combine_norm_v4": ("hc_combine_norm", dict(T=3, H=96)),
    "hc_head_v4": ("hc_head", dict(T=3, H=64)),
    "rms_norm_v4": ("rms_norm", dict(T=4, H=96)),
    "head_norm_v4": ("head_norm", dict(T=3, h=2)),
    "block_linear_v4": ("block_linear", dict(T=4, N=128, K=256, b=128)),
    "compress_v4": ("compress", dict(L=15, H=16, ratio=4)),
    "compress_v4_128": ("compress", dict(L=260, H=8, ratio=128)),
    "index_query_v4": ("index_query", dict(T=4, h=2)),
    "index_key_v4": ("index_key", dict(L=15, H=16)),
    "index_select_v4": ("index_select", dict(T=4, h=2, N=50, k=16)),
    "gate_v4": ("gate", dict(T=4, H=64, E=17)),
    "hash_gate_v4": ("hash_gate", dict(T=4, V=30, H=64, E=17)),
    "experts_v4": ("experts", dict(T=4, E=6, H=128, I=128, b=128)),
}
# Case to (operation, models, shape); the first model makes the inputs and the outputs.
CASES = {
    op: (op, ["v41", "v4"] if op in oracle.SHARED and f"{op}_v4" not in V4 else ["v41"], shape)
    for op, shape in V41.items()
} | {name: (op, ["v4"], shape) for name, (op, shape) in V4.items()}


def awkward(op, model, arrays):
    """Signed zeros, subnormals, saturation, ties, paddings and the ends of the ranges."""
    for name in ("x", "residual", "q"):
        if name in arrays and arrays[name].dtype == np.uint16:
            row = arrays[name][-1].reshape(-1)
            row[:6] = [0x8000, 0x0000, 0x0001, 0x8001, 0x807F, 0x4380]
    if op == "kv_pack":
        arrays["kv"][-1, :64] = 0.0
        arrays["kv"][-1, 64:128] = 1e-42
        arrays["kv"][-2, :4] = [448.0, -432.0, 1.0625, 1.1875]
    if op == "rank_sum":
        arrays["partial"][:, 0, 0] = [2.0**24, 1.0, -(2.0**24), 1.0]
    if op == "sparse_attention":
        arrays["swa_idx"][1], arrays["extra_idx"][1] = -1, -1
        arrays["sink"][1] = -np.inf
    if op == "compress":
        arrays["x"][1] = arrays["x"][0]
    if op == "compress" and model == "v41":
        arrays["norm"][:16] = bf16_bits(bf16_value(arrays["norm"][:16]) * 4096)
    if (op, model) in (("compress", "v4"), ("index_key", "v4")):
        arrays["x"][4:8] = 0
        arrays["ape"][0, ::3] = 60.0  # one candidate takes all
    if op == "gate":
        arrays["w"][9] = arrays["w"][4]
        arrays["bias"][[4, 9]] = 0.5
    if op == "index_key" and model == "v41":
        arrays["pos"][:2] = [0, 65535]
        arrays["latent"][0] = 0
    if op == "candidate_blocks":
        arrays["count"][1:3] = [0, 9]
        arrays["score"][3] = 0.5
    if op == "index_select":
        arrays["ik"][20:30] = arrays["ik"][20]
        arrays["count"][1] = 0
        if "blocks" in arrays:
            arrays["blocks"][1] = -1
    if op == "engram_hash":
        arrays["image_token"] = one(arrays["history"][2, 1])
        arrays["pos"][:4] = [0, 1, 1048575, 3]
    if op == "markov_draft":
        arrays["base"][0, 0, [5, 40]] = 30.0
        arrays["temp"][1] = 1e-7
    if op == "accept":
        arrays["coins"][-1] = 0.0
        arrays["target_logits"][0, 0, [3, 9]] = 20.0
        arrays["draft"][0, 0] = 9
    return arrays


def golden_bound(declared, array):
    """A case of known inputs needs no words: selections and draws of these are clear of ties."""
    if declared.startswith("values") and array.shape[-1] == 132:
        return "values rel_l2 <= 1e-6"  # V4's index keys: an fp32 scale behind the codes
    if declared.startswith(("equal", "values")):
        return "bitwise"
    term = TERM.match(declared)
    return term[0] if term else declared


def fnv1a64(data):
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = ((digest ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{digest:016x}"


def describe(folder, prefix, name, array):
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()
    file = f"{prefix}_{name}.bin"
    (folder / file).write_bytes(data)
    return {
        "name": name,
        "dtype": DTYPES[array.dtype.name],
        "shape": list(array.shape),
        "file": file,
        "fnv1a64": fnv1a64(data),
    }


def write_case(out, name):
    op, models, shape = CASES[name]
    folder = out / name
    folder.mkdir(parents=True)
    inputs = awkward(op, models[0], make(op, SEED, models[0], **shape))
    outputs = kernels.run(op, "reference", inputs, models[0])
    declared = {platform: kernels.bounds(op, platform, models[0]) for platform in ("scalar",)}
    case = {
        "op": op,
        "models": models,
        "seed": SEED,
        "inputs": [describe(folder, "in", n, a) for n, a in sorted(inputs.items())],
        "outputs": [
            describe(folder, "out", n, a)
            | {"bounds": {p: golden_bound(bound[n], a) for p, bound in declared.items()}}
            for n, a in sorted(outputs.items())
        ],
    }
    text = json.dumps(case, indent=1)
    (folder / "case.json").write_text(text + "\n", encoding="utf-8")


def write_all(out):
    """Replaces the folder `out`."""
    if out.exists():
        shutil.rmtree(out)
    for name in CASES:
        write_case(out, name)


def main():
    parser = argparse.ArgumentParser(description="write the golden vectors")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/golden")
    out = parser.parse_args().out
    write_all(out)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{len(CASES)} cases, {size / 1e3:.0f} kB in {out}")


if __name__ == "__main__":
    main()
