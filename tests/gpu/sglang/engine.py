"""Runs SGLang's engine on one GPU with the plugin off and on, and compares.

    python engine.py --model DIR --out DIR [--batches 1,2,4] [--prompt 600] [--tokens 64]

DIR holds a config.json of DeepSeek-V4.1 or V4 in true sizes, of as many layers as fit; weights are
SGLang's dummy ones, unless DIR has weights too. SGLang 0.5.23 and lowlat with its CUDA kernels must
be importable, and no other distribution may offer the plugin `nvidia_megakernel`. Each arm is a
process of its own, with the same prompts, greedy. Writes DIR/{off,on}.json and .log, and prints one
line a batch: requests, tokens that are equal, and the time a token of both arms. Exit status 1 when
an arm fails or the plugin's arm ran no covered step.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARMS = ("off", "on")
ACTIVE = "NVIDIA megakernel: active"


def offer(out: Path) -> Path:
    """A folder whose metadata offers the one-GPU specs as SGLang's loader looks for them."""
    site = out / "site"
    info = site / "lowlat_one_gpu-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lowlat-one-gpu\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nnvidia_megakernel = lowlat_one_gpu:register_nvidia\n"
    )
    return site


async def one(engine, ids, length):
    """Tokens of one request, and when each piece of them came."""
    params = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
    times, tokens = [], []
    stream = await engine.async_generate(input_ids=ids, sampling_params=params, stream=True)
    async for piece in stream:
        times.append(time.perf_counter())
        tokens = piece["output_ids"]
    return tokens, times


async def batch(engine, size, args, vocab):
    draw = random.Random(size)
    prompts = [[draw.randrange(10, vocab) for _ in range(args.prompt)] for _ in range(size)]
    done = await asyncio.gather(*(one(engine, ids, args.tokens) for ids in prompts))
    rates = [
        (times[-1] - times[0]) / max(1, len(tokens) - 1) for tokens, times in done if len(times) > 1
    ]
    return {
        "requests": size,
        "tokens": [list(tokens) for tokens, _ in done],
        "ms_a_token": 1e3 * statistics.median(rates) if rates else None,
    }


def arm(args) -> int:
    """One process: the engine with the plugin or without."""
    import sglang

    sizes = [int(size) for size in args.batches.split(",")]
    options = {}
    if not args.plain:
        options |= {"speculative_algorithm": "DSPARK", "speculative_dspark_block_size": 5}
    engine = sglang.Engine(
        model_path=str(args.model),
        load_format=args.load_format,
        skip_tokenizer_init=True,
        tp_size=1,
        moe_runner_backend="marlin",
        attention_backend="dsv4",
        disable_radix_cache=True,
        context_length=args.context,
        max_running_requests=max(sizes) + 2,
        max_total_tokens=args.pool,
        cuda_graph_bs_decode=sizes,
        mem_fraction_static=args.memory,
        enable_nvidia_megakernel=args.arm == "on",
        random_seed=1,
        log_level="info",
        **options,
    )
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"] - 1000
    runs = []
    try:
        engine.loop.run_until_complete(batch(engine, 1, args, vocab))
        for size in sizes:
            runs.append(engine.loop.run_until_complete(batch(engine, size, args, vocab)))
            (args.out / f"{args.arm}.json").write_text(json.dumps(runs))
    finally:
        engine.shutdown()
    return 0


def run_arm(name: str, args) -> list:
    log = args.out / f"{name}.log"
    env = os.environ | {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
    paths = [str(offer(args.out)), str(HERE), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", name]
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, stdout=out, stderr=out, env=env, start_new_session=True
        ) as process,
    ):
        try:
            status = process.wait(args.limit)
        except subprocess.TimeoutExpired:
            status = f"no end within {args.limit} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if status != 0:
        print(f"arm {name}: {status}; the end of {log}:")
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]))
        return []
    return json.loads((args.out / f"{name}.json").read_text())


def compare(off: list, on: list) -> None:
    for left, right in zip(off, on, strict=True):
        pairs = [
            (a, b)
            for one, other in zip(left["tokens"], right["tokens"], strict=True)
            for a, b in zip(one, other, strict=False)
        ]
        equal = sum(a == b for a, b in pairs)
        first = [
            next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
            for one, other in zip(left["tokens"], right["tokens"], strict=True)
        ]
        print(
            f"{left['requests']} requests: {equal} of {len(pairs)} tokens equal, first differences"
            f" at {first}; {left['ms_a_token']:.3f} ms a token without the plugin,"
            f" {right['ms_a_token']:.3f} with it"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="1,2,4")
    parser.add_argument("--prompt", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--pool", type=int, default=32768)
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--limit", type=float, default=500.0, help="seconds for an arm")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--plain", action="store_true", help="decode without drafts")
    parser.add_argument("--only", choices=ARMS, help="one arm, nothing compared")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.arm:
        return arm(args)
    arms = [args.only] if args.only else ARMS
    results = {name: run_arm(name, args) for name in arms}
    if not all(results.values()):
        return 1
    if "on" in arms and ACTIVE not in (args.out / "on.log").read_text(errors="replace"):
        print(f"the log of the plugin's arm has no line {ACTIVE!r}")
        return 1
    if not args.only:
        compare(results["off"], results["on"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
