"""Runs SGLang's engine on a GPU or some with the plugin off and on, and compares.

    python engine.py --model DIR --out DIR [--arms on,off] [--tp 2] [--share 4] [--fault]
        [--batches 1,2] [--graphs 1,2,4,8] [--prompt 300] [--tokens 40] [--eager 2]
        [--timed 4000] [--timed-tokens 200] [--accept 3.51]

DIR holds a config.json of DeepSeek-V4.1 or V4 in true sizes, of as many layers as fit, or with
--share 4 the sizes of one rank of four (a quarter of the heads, output groups, expert width and
vocabulary; no n-gram memory), which the kernels of four ranks run looped. Weights are random ones,
unless DIR has weights too (--load-format). SGLang 0.5.23 and lowlat with its CUDA kernels must be
importable, and no other distribution may offer the plugin `nvidia_megakernel`. Each arm is a
process of its own, with the same prompts, greedy:

    on off  with the plugin and without. Batches run as CUDA graphs: their tokens are compared, and
            with --timed those of prompts of so many tokens, whose times are. With --eager batches
            follow that no graph runs: SGLang runs each covered step beside the plugin, over the
            same rows and caches, and the differences are told. Where tokens are compared biases
            choose the experts, where times are taken scores do. --accept: drafts so long on average
            are taken for right in all of it
    --crowd while one request is answered so many others come and go, more than any width holds, and
            another one is given up: the first one's tokens come on
    --fault at its end the plugin's arm has its kernels aborted amid the work: how the server ends

Writes a .log and a .json of each arm under --out. Exit status 1 when an arm fails or a plugin's arm
ran no covered step.
"""

import argparse
import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARMS = ("on", "off")
ACTIVE = "NVIDIA megakernel: active"
# Of a covered step that both ran: |ours - SGLang's| / |SGLang's| of a row's logits.
BESIDE = re.compile(r"beside: step \d+ (\w+) (\d+) rows: logits median (\S+) most (\S+), best")
# Of a draft's block, of what its last layer left.
DRAFT_BESIDE = re.compile(r"beside: (draft) of (\d+) rows: hidden states median (\S+) most (\S+)")
ABORTED = "the kernels are aborted now"
FAULT_TOKENS = 4000
GIVEN_UP_S = 20
LOCK_S = 300


def offer(out: Path) -> Path:
    """A folder whose metadata offers those specs as SGLang's loader looks for them."""
    site = out / "site"
    info = site / "lowlat_few_gpus-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lowlat-few-gpus\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nnvidia_megakernel = lowlat_few_gpus:register_nvidia\n"
        "lowlat_dummy_weights = lowlat_few_gpus:dummy_weights\n"
    )
    return site


async def one(engine, ids, length, started=None, rid=None):
    """Tokens of one request, and when each piece of them came; `started` is set with the first."""
    params = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
    times, tokens = [], []
    stream = await engine.async_generate(
        input_ids=ids, sampling_params=params, stream=True, rid=rid
    )
    async for piece in stream:
        if started is not None:
            started.set()
        times.append(time.perf_counter())
        tokens = piece["output_ids"]
    return tokens, times


def prompts_of(size, prompt, vocab):
    """A request's prompt is the same in every batch."""
    prompts = []
    for request in range(size):
        draw = random.Random(request)
        prompts.append([draw.randrange(10, vocab) for _ in range(prompt)])
    return prompts


async def crowd(engine, size, prompt, length, vocab):
    """One request, amid whose tokens `size` others come and go and one more is given up."""
    first, given_up, *others = prompts_of(2 + size, prompt, vocab)
    started, begun = asyncio.Event(), asyncio.Event()
    whole = asyncio.ensure_future(one(engine, first, 8 * length, started))
    await started.wait()
    lost = asyncio.ensure_future(one(engine, given_up, 100 * length, begun, "given-up"))
    await begun.wait()
    engine.tokenizer_manager.abort_request("given-up")
    done = await asyncio.gather(*(one(engine, ids, length) for ids in others))
    tokens, times = await whole
    # Who waits for it may be told by an exception.
    (end,) = await asyncio.gather(asyncio.wait_for(lost, GIVEN_UP_S), return_exceptions=True)
    left = [] if isinstance(end, BaseException) else end[0]
    print(
        f"crowd of {size}: {len(tokens)} tokens of the first one in {times[-1] - times[0]:.2f} s,"
        f" {sorted(len(one) for one, _ in done)} of the others, {len(left)} of the one given up"
        f" (of {100 * length})",
        flush=True,
    )


async def batch(engine, size, prompt, length, vocab):
    prompts = prompts_of(size, prompt, vocab)
    done = await asyncio.gather(*(one(engine, ids, length) for ids in prompts))
    # A piece is what a step accepted. The first ones come while others' prompts run.
    last_first = max(times[0] for _, times in done)
    gaps = [
        after - before
        for _, times in done
        for before, after in itertools.pairwise(times)
        if before >= last_first
    ]
    rates = [(len(tokens) - 1) / (times[-1] - times[0]) for tokens, times in done if len(times) > 1]
    return {
        "requests": size,
        "prompt": prompt,
        "tokens": [list(tokens) for tokens, _ in done],
        "step_ms": [1e3 * quantile(gaps, q) for q in (0.5, 0.9)] if gaps else None,
        "tokens_a_s": statistics.median(rates) if rates else None,
    }


def quantile(values, part):
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def arm(args) -> int:
    """One process: the engine with the plugin or without."""
    import sglang

    sizes, graphs = numbers(args.batches), numbers(args.graphs)
    options = {"cuda_graph_bs_decode": graphs}
    if not graphs:
        options = {"cuda_graph_backend_decode": "disabled"}
    if not args.plain:
        options |= {"speculative_algorithm": "DSPARK", "speculative_dspark_block_size": 5}
    engine = sglang.Engine(
        model_path=str(args.model),
        load_format=args.load_format,
        skip_tokenizer_init=True,
        tp_size=args.tp,
        moe_runner_backend="marlin",
        attention_backend="dsv4",
        disable_radix_cache=True,
        context_length=args.context,
        max_running_requests=max([*sizes, *graphs, args.crowd]) + 2,
        max_total_tokens=args.pool,
        mem_fraction_static=args.memory,
        enable_nvidia_megakernel=args.arm != "off",
        # What would be compiled or fetched at its first use.
        enforce_disable_flashinfer_allreduce_fusion=True,
        disable_flashinfer_autotune=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        random_seed=1,
        log_level="info",
        **options,
    )
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"] - 1000
    runs = []
    try:
        run = engine.loop.run_until_complete
        shortest = min(numbers(args.prompt))
        run(batch(engine, 1, shortest, args.tokens, vocab))
        wanted = [(size, prompt) for prompt in numbers(args.prompt) for size in sizes]
        wanted += [(size, -shortest) for size in numbers(args.eager) if args.arm == "on"]
        wanted += [(size, args.timed) for size in graphs if args.timed]
        for size, prompt in wanted:
            length = args.tokens
            switch(args, "eager", prompt < 0)
            if prompt == args.timed:
                length = args.timed_tokens
                if not switched(args, "free").exists():
                    switch(args, "free", True)
                    run(batch(engine, 1, prompt, args.tokens, vocab))
            with alone(args.lock):
                done = run(batch(engine, size, abs(prompt), length, vocab))
            if prompt > 0:
                runs.append(done)
            (args.out / f"{args.arm}.json").write_text(json.dumps(runs))
        switch(args, "eager", False)
        if args.crowd and args.arm == "on":
            run(crowd(engine, args.crowd, shortest, args.tokens, vocab))
        if args.fault and args.arm == "on":
            engine.loop.call_later(1.0, switch, args, "abort", True)
            run(batch(engine, 1, shortest, FAULT_TOKENS, vocab))
    finally:
        engine.shutdown()
    return 0


def switched(args, name: str) -> Path:
    """The file that switches something in the engine's processes."""
    return args.out / f"{args.arm}.{name}"


def switch(args, name: str, on: bool) -> None:
    if on:
        switched(args, name).touch()
    else:
        switched(args, name).unlink(missing_ok=True)


@contextlib.contextmanager
def alone(path: Path | None):
    """No other engine with the same file runs a batch meanwhile."""
    if path is None:
        yield
        return
    end = time.monotonic() + LOCK_S
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
        yield


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word]


def run_arm(name: str, args) -> list:
    """The batches of an arm, or none when it failed."""
    log = args.out / f"{name}.log"
    env = os.environ | {
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "LOWLAT_TEST_RANKS": str(args.share),
        "LOWLAT_TEST_BIAS": str(args.bias),
    }
    for what in ("free", "eager", "abort"):
        path = args.out / f"{name}.{what}"
        path.unlink(missing_ok=True)
        env[f"LOWLAT_TEST_{what.upper()}"] = str(path)
    if args.accept:
        env |= {
            "SGLANG_SIMULATE_ACC_LEN": str(args.accept),
            "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
            "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
        }
    if name == "on" and args.eager:
        env["LOWLAT_TEST_BESIDE"] = "1"
    paths = [str(offer(args.out)), str(HERE), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", name]
    start = time.monotonic()
    with (
        log.open("w") as out,
        subprocess.Popen(
            command, stdout=out, stderr=out, env=env, start_new_session=True
        ) as process,
    ):
        try:
            if name == "on" and args.fault:
                told = watch_fault(process, log, start + args.limit)
                status = 0 if told else "no end by the fault"
            else:
                status = process.wait(args.limit)
        except subprocess.TimeoutExpired:
            status = f"no end within {args.limit:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    print(f"arm {name}: {time.monotonic() - start:.0f} s", flush=True)
    if status != 0:
        print(f"arm {name}: {status}; the end of {log}:")
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]))
        return []
    if name != "off" and ACTIVE not in log.read_text(errors="replace"):
        print(f"the log of the arm {name} has no line {ACTIVE!r}")
        return []
    return json.loads((args.out / f"{name}.json").read_text())


def watch_fault(process, log: Path, end: float) -> list:
    """How long after the abort the server is gone, and what it logged."""
    aborted = None
    while time.monotonic() < end:
        if aborted is None and ABORTED in log.read_text(errors="replace"):
            aborted = time.monotonic()
        if process.poll() is not None:
            break
        time.sleep(0.01)
    if aborted is None or process.poll() is None:
        print(f"fault: aborted {aborted is not None}, ended {process.poll() is not None}")
        return []
    print(f"fault: the server ended {time.monotonic() - aborted:.2f} s after the abort")
    print(
        "\n".join(
            line for line in log.read_text(errors="replace").splitlines() if "crowd of" in line
        )
    )
    lines = [line for line in log.read_text(errors="replace").splitlines() if "lowlat: " in line]
    print("\n".join(lines[-3:]))
    return lines[-1:]


def beside(log: str) -> bool:
    """The differences of each kind of step, worst and median; whether every one is finite."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for mode, rows, median, most in BESIDE.findall(log) + DRAFT_BESIDE.findall(log):
        found.setdefault((mode, int(rows)), []).append((float(median), float(most)))
    for (mode, rows), values in sorted(found.items()):
        what = "hidden states" if mode == "draft" else "logits"
        medians, worst = sorted(median for median, _ in values), max(most for _, most in values)
        print(
            f"beside: {len(values)} {mode} steps of {rows} rows: {what} differ by"
            f" {medians[len(medians) // 2]:.5f} (median of medians), {medians[-1]:.5f} (greatest"
            f" median), {worst:.5f} (worst row)"
        )
    return all(most == most for values in found.values() for _, most in values)


def alike(left: list, right: list) -> str:
    """How far two lists of requests' tokens are the same."""
    pairs = [
        (a, b)
        for one, other in zip(left, right, strict=False)
        for a, b in zip(one, other, strict=False)
    ]
    first = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        for one, other in zip(left, right, strict=False)
    ]
    equal = sum(a == b for a, b in pairs)
    return f"{equal} of {len(pairs)} tokens equal, first differences at {first}"


def compare(off: list, on: list) -> None:
    for left, right in zip(off, on, strict=False):
        print(f"{left['requests']} requests of {left['prompt']} tokens:")
        print(f"    with and without the plugin {alike(left['tokens'], right['tokens'])}")
        for name, one in (("without it", left), ("with it", right)):
            if one["step_ms"]:
                print(
                    f"    {name} {one['step_ms'][0]:.3f} ms from piece to piece (P90"
                    f" {one['step_ms'][1]:.3f}), {one['tokens_a_s']:.1f} tokens/s a user"
                )
    # What another batch size does to the same prompts' tokens.
    for name, runs in (("without", off), ("with", on)):
        for one, other in itertools.pairwise(runs):
            if one["prompt"] == other["prompt"]:
                print(
                    f"{name} the plugin, {one['requests']} and {other['requests']} requests of"
                    f" {one['prompt']} tokens: {alike(one['tokens'], other['tokens'])}"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default="on,off", help="in this order")
    parser.add_argument("--tp", type=int, default=1, help="GPUs")
    parser.add_argument("--share", type=int, default=1, help="the model is one rank's of so many")
    parser.add_argument("--bias", type=float, default=4.0, help="spread of the experts' biases")
    parser.add_argument("--batches", default="1,2")
    parser.add_argument("--graphs", default="1,2,4,8", help="batches in CUDA graphs; empty: none")
    parser.add_argument("--prompt", default="300")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--eager", default="", help="batches that no graph runs")
    parser.add_argument("--timed", type=int, default=0, help="prompt of batches that are timed")
    parser.add_argument("--timed-tokens", type=int, default=200)
    parser.add_argument("--accept", type=float, default=0.0, help="tokens that a step accepts")
    parser.add_argument("--crowd", type=int, default=0, help="requests that come and go")
    parser.add_argument("--fault", action="store_true", help="end the plugin's arm by an abort")
    parser.add_argument("--lock", type=Path, help="engines with the same file take turns")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--pool", type=int, default=49152)
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--limit", type=float, default=500.0, help="seconds for an arm")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--plain", action="store_true", help="decode without drafts")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.arm:
        return arm(args)
    arms = args.arms.split(",")
    results = {name: run_arm(name, args) for name in arms}
    good = all(results.values())
    if results.get("on"):
        good &= beside((args.out / "on.log").read_text(errors="replace"))
    if results.get("on") and results.get("off"):
        compare(results["off"], results["on"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
