"""Runs SGLang's engine on a GPU or some with the plugin off and on, and compares.

    python engine.py --model DIR --out DIR [--arms on,off,bare] [--tp 2] [--share 4] [--fault]
        [--batches 1,2] [--graphs 1,2,4,8] [--prompt 300] [--tokens 40] [--eager 2]
        [--timed 4000] [--timed-tokens 200] [--repeats 1] [--accept 3.51] [--greedy 6] [--chain 1]
        [--together] [--trace 8]

DIR holds a config.json of DeepSeek-V4.1 or V4 in true sizes, of as many layers as fit, or with
--share 4 the sizes of one rank of four (a quarter of the heads, output groups, expert width and
vocabulary; no n-gram memory), which the kernels of four ranks run looped. Weights are random ones,
unless DIR has weights too (--load-format). SGLang 0.5.23 and lowlat with its CUDA kernels must be
importable. Each arm is a process of its own, with the same prompts, greedy:

    on off  with the plugin and without. Batches run as CUDA graphs. With --timed those of prompts
            of so many tokens come first, whose times are told: from piece to piece, and on the GPU
            of both graphs and from step to step. Then batches whose tokens are compared. With
            --eager batches follow that no graph runs: SGLang runs each covered step beside the
            plugin, over the same rows and caches, and once more from embeddings that lie a
            rounding beside. What differs is told of each layer and at the head, and held to
            bounds. Where tokens are compared biases choose the experts, where times are taken
            scores do. --accept: drafts so long on average are taken for right in all of it. off:
            lowlat is installed and its flag is off
    bare    the same as off, and no plugin of lowlat's is installed: what differs from off is noise
    --greedy so many prompts follow one after the other: where two arms' tokens part first, how far
            apart the two tokens' logits are, which must be no more than the bounds leave open.
            With --chain the head expects behind a token the next one of the vocabulary, more or
            less by the token, and drafts say so: then drafts are accepted, and most tokens are sure
    --trace batches of so many requests, of the timed ones' prompts, follow the timed ones; of some
            steps when which kernel ran goes to a file. Such a process is slower from then on
    --together  the arms' servers start at the same time, on the same GPU, and run their batches in
            turns, from when all of them are warm
    --crowd while one request is answered so many others come and go, more than any width holds, and
            another one is given up: the first one's tokens come on
    --fault at its end the plugin's arm has its kernels aborted amid the work: how the server ends

Writes a .log of each arm under --out, a .json that grows by each batch, and of some rows that both
ran what exact.py compares with float64. Exit status 1 when an arm fails, a plugin's arm ran no
covered step, two arms differ by more than the bounds, tokens part that are no near tie, or a fault
left logits that are numbers or no post-mortem.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import fcntl
import itertools
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
ARMS = ("on", "off", "bare")
# What an arm has in its processes beside SGLang, by the plugin's name; and in every arm.
PLUGINS = {
    "on": "nvidia_megakernel = lowlat_few_gpus:register_nvidia\n",
    "off": "nvidia_megakernel = lowlat.plugin:register_nvidia\n",
    "bare": "",
}
IN_EVERY_ARM = "lowlat_every_arm = every_arm:prepare\n"
ACTIVE = "NVIDIA megakernel: active"
BESIDE = "beside: "
ABORTED = "the kernels are aborted now: "
REPLAYED = "a graph ran behind the abort: "
FAULT = "lowlat: rank "
# SGLang's launcher asks its schedulers for diagnostics, which takes 5 s and more.
DIAGNOSTICS = "before crash diagnostics"
# Less than those take, and many times what it takes without them.
FAULT_END_S = 1.0
# How far the plugin may lie from SGLang's own forward: in what that differs by from itself when its
# embeddings are a rounding beside, behind each layer and at the head.
MOST_OF_A_ROUNDING = 1.25
# Where tokens part, the arms' logits of the two differ by as much as they lie apart in both: of one
# logit's difference, whose spread is the declared bound of the row's, so many spreads of two.
SPREADS_OF_A_TIE = 4 * 2**0.5
FAULT_TOKENS = 4000
GIVEN_UP_S = 20
TRACE_TOKENS = 200
LOCK_S = 300
LOCK_LOOK_S = 0.02
# What the arms' processes need to see that a switch is another.
SWITCHED_S = 0.2


def offer(out: Path, name: str) -> Path:
    """A folder whose metadata offers what the arm has as SGLang's loader looks for it. Of two
    distributions of a name the first one on the path counts: what an installed lowlat offers is not
    found behind this one."""
    site = out / f"site-{name}"
    info = site / "lowlat-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lowlat\nVersion: 0.0.0\n")
    words = f"[sglang.srt.plugins]\n{PLUGINS[name]}{IN_EVERY_ARM}"
    (info / "entry_points.txt").write_text(words)
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


def prompts_of(size, prompt, vocab, first=0):
    """A request's prompt is the same in every batch."""
    prompts = []
    for request in range(first, first + size):
        draw = random.Random(request)
        prompts.append([draw.randrange(10, vocab) for _ in range(prompt)])
    return prompts


async def crowd(engine, size, prompt, length, vocab):
    """One request, amid whose tokens `size` others come and go and one more is given up."""
    first, given_up, *others = prompts_of(2 + size, prompt, vocab)
    by_itself, _ = await one(engine, first, 8 * length)
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
        f"crowd of {size}: {len(tokens)} tokens of the first one in {times[-1] - times[0]:.2f} s"
        f" ({alike([by_itself], [tokens])} with those that it had alone: {by_itself[:6]},"
        f" {tokens[:6]}),"
        f" {sorted(len(one) for one, _ in done)} of the others, {len(left)} of the one given up"
        f" (of {100 * length})",
        flush=True,
    )


async def batch(engine, size, prompt, length, vocab, first=0):
    prompts = prompts_of(size, prompt, vocab, first)
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
        "steps": max(len(times) for _, times in done) - 1,
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
        enable_nvidia_megakernel=args.arm == "on",
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
        timed = graphs * args.repeats if args.timed else []
        if args.together:
            if timed:
                run(batch(engine, max(timed), args.timed, args.tokens, vocab))
            meet(args)
        if timed:
            switch(args, "free", True)
            with alone(args):
                run(batch(engine, 1, args.timed, args.tokens, vocab))
        for number, size in enumerate(timed):
            with alone(args):
                switched(args, "timed").write_text(str(number))
                done = run(batch(engine, size, args.timed, args.timed_tokens, vocab))
                switch(args, "timed", False)
            done["graphs"] = graph_times(args.out, args.arm, number, size)
            keep(args, runs, done)
        for size in numbers(args.trace):
            with alone(args):
                switched(args, "trace").write_text(str(size))
                run(batch(engine, size, args.timed or shortest, TRACE_TOKENS, vocab))
                switch(args, "trace", False)
        if timed:
            switch(args, "free", False)
            time.sleep(SWITCHED_S)
        for number in range(args.greedy):
            switched(args, "logits").write_text(str(number))
            with alone(args):
                done = run(batch(engine, 1, shortest, args.tokens, vocab, number))
            keep(args, runs, done | {"greedy": number})
        switch(args, "logits", False)
        for prompt, size in itertools.product(numbers(args.prompt), sizes):
            with alone(args):
                done = run(batch(engine, size, prompt, args.tokens, vocab))
            keep(args, runs, done)
        switch(args, "eager", True)
        for size in numbers(args.eager) if args.arm == "on" else []:
            with alone(args):
                run(batch(engine, size, shortest, args.tokens, vocab))
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


def keep(args, runs: list, done: dict) -> None:
    """Adds a batch to the arm's file: one whose time ran out leaves what it has done."""
    runs.append(done)
    path = args.out / f"{args.arm}.json"
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(runs))
    whole.replace(path)


def meet(args) -> None:
    """Waits until every arm is warm, or has ended."""
    word_of(args.out, args.arm, "warm").touch()
    end = time.monotonic() + args.limit
    for other in args.arms.split(","):
        while not any(word_of(args.out, other, word).exists() for word in ("warm", "ended")):
            if time.monotonic() > end:
                raise TimeoutError(f"the arm {other} is not warm within {args.limit:g} s")
            time.sleep(LOCK_LOOK_S)


def word_of(folder: Path, name: str, word: str) -> Path:
    """The file that says to the other arms how far an arm is."""
    return folder / f"{name}.{word}"


@contextlib.contextmanager
def alone(args):
    """No other engine with the same file runs a batch meanwhile."""
    path = args.lock or (args.out / "turns" if args.together else None)
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
                time.sleep(LOCK_LOOK_S)
        yield
    # Who waits comes first.
    time.sleep(4 * LOCK_LOOK_S)


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",") if word]


def run_arm(name: str, args) -> list:
    """The batches of an arm, or none when it failed."""
    log = args.out / f"{name}.log"
    env = os.environ | {
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "LOWLAT_TEST_RANKS": str(args.share),
        "LOWLAT_TEST_BIAS": str(args.bias),
        "LOWLAT_TEST_CHAIN": str(args.chain),
    }
    for path in (logits_of(args.out, name), graphs_of(args.out, name)):
        path.unlink(missing_ok=True)
    for what in ("free", "eager", "abort", "logits", "timed", "trace"):
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
        env |= {"LOWLAT_TEST_BESIDE": "1", "LOWLAT_TEST_KEEP": str(args.out / "kept")}
    env.setdefault("LOWLAT_FAULT_DIR", str(args.out))
    paths = [str(offer(args.out, name)), str(HERE), env.get("PYTHONPATH", "")]
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
                told = watch_fault(process, log, args.out, start + args.limit)
                status = 0 if told else "no end by the fault"
            else:
                status = process.wait(args.limit)
        except subprocess.TimeoutExpired:
            status = f"no end within {args.limit:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            word_of(args.out, name, "ended").touch()
    print(f"arm {name}: {time.monotonic() - start:.0f} s", flush=True)
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(line for line in lines if line.startswith("crowd of")))
    if status != 0:
        print(f"arm {name}: {status}; the end of {log}:")
        print("\n".join(lines[-25:]))
        return []
    text = "\n".join(lines)
    if (name == "on") != (ACTIVE in text):
        print(f"the log of the arm {name} has {'no' if name == 'on' else 'a'} line {ACTIVE!r}")
        return []
    if FAULT in text and not args.fault:
        print(f"the arm {name} had a fault, or its shutdown was taken for one")
        return []
    return json.loads((args.out / f"{name}.json").read_text())


def watch_fault(process, log: Path, folder: Path, end: float) -> bool:
    """When after the abort what happened; whether it is all that has to."""
    aborted, told = None, {}

    def seen(what: str, is_so: bool) -> None:
        if is_so and what not in told:
            told[what] = time.time() - aborted["time"]

    while time.monotonic() < end and "server ended" not in told:
        text = log.read_text(errors="replace")
        if aborted is None:
            aborted = next(words_behind(ABORTED, text), None)
        if aborted is not None:
            seen("line", FAULT in text)
            seen("signal", "SIGQUIT received" in text)
            seen("scheduler ended", not is_there(aborted["pid"]))
        if process.poll() is not None:
            if aborted is None:
                break
            seen("server ended", True)
        time.sleep(0.02 if aborted is None else 0.002)
    if "server ended" not in told:
        print(f"fault: aborted {aborted is not None}, ended {process.poll() is not None}")
        return False
    text = log.read_text(errors="replace")
    files = list(fault_folder(folder).glob(f"lowlat-fault-{aborted['pid']}-*.json"))
    for path in files:
        told["post-mortem"] = path.stat().st_mtime - aborted["time"]
        print(f"fault: {json.loads(path.read_text())['words']}")
    behind = list(words_behind(REPLAYED, text))
    for words in behind[:1]:
        told["graph behind it"] = words["time"] - aborted["time"]
    times = ", ".join(f"{what} {1e3 * at:.0f} ms" for what, at in sorted(told.items(), key=by_time))
    print(f"fault: behind the abort: {times}")
    print(f"fault: {len(behind)} graphs ran behind it, of their logits NaN {nan_of(behind)}")
    print(f"fault: the launcher asked for diagnostics: {DIAGNOSTICS in text}")
    ended = told["server ended"] < FAULT_END_S
    return ended and bool(files) and FAULT in text and all(w["nan"] == 1.0 for w in behind)


def by_time(item) -> float:
    return item[1]


def nan_of(behind: list) -> list:
    return sorted({words["nan"] for words in behind})


def fault_folder(folder: Path) -> Path:
    return Path(os.environ.get("LOWLAT_FAULT_DIR", folder))


def is_there(pid: int) -> bool:
    """Whether the process is there, and more than a number that nobody asked for yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def words_behind(mark: str, text: str):
    """What the lines with that mark hold."""
    for line in text.splitlines():
        _, found, words = line.partition(mark)
        if found and words.startswith("{"):
            yield json.loads(words)


def beside(log: str) -> bool:
    """Tells the differences of each kind of step; whether there are any, all finite and within the
    bounds."""
    most = declared_bound()
    kinds: dict[tuple[str, int], list[dict]] = {}
    for words in words_behind(BESIDE, log):
        kinds.setdefault((words["mode"], words["rows"]), []).append(words)
    good = True
    for (mode, rows), found in sorted(kinds.items()):
        what = "hidden" if mode == "draft" else "logits"
        print(f"beside: {len(found)} {mode} steps of {rows} rows, medians over rows and steps:")
        good &= within(what, [words[what][0] for words in found], moved_of(found, what))
        if what == "logits" and statistics.median(words[what][0] for words in found) > most:
            print(f"    {what}: more than the declared {most}")
            good = False
        print(
            f"    {what}: greatest median {max(words[what][0] for words in found):.5f}, worst row"
            f" {max(words[what][1] for words in found):.5f}"
        )
        if mode == "draft":
            continue
        again = statistics.median(words["again_logits"][0] for words in found)
        print(f"    logits: SGLang the same again {again:.5f}")
        for name in ("best", "moved_best"):
            part = statistics.mean(words[name] for words in found)
            print(f"    {name}: the token is SGLang's in {100 * part:.0f} % of rows")
        for layer in range(len(found[0]["layers"])):
            ours = [words["layers"][layer] for words in found]
            moved = [words["moved_layers"][layer] for words in found]
            good &= within(f"features of layer {layer}", ours, moved)
    if not kinds:
        print("beside: nothing was compared")
    return good and bool(kinds)


def declared_bound() -> float:
    """How far the plugin's logits may lie from SGLang's, of a row. Imported here, since an arm
    without the plugin has nothing of lowlat in its processes."""
    from lowlat.specs.alike import LOGITS_MEDIAN_REL_OF_SGLANG

    return LOGITS_MEDIAN_REL_OF_SGLANG


def moved_of(found: list, what: str) -> list[float]:
    return [words[f"moved_{what}"][0] for words in found]


def within(what: str, ours: list[float], moved: list[float]) -> bool:
    """Prints both medians; whether ours is finite and not too far."""
    one, other = statistics.median(ours), statistics.median(moved)
    good = all(value == value for value in ours) and one <= MOST_OF_A_ROUNDING * other
    print(
        f"    {what}: the plugin {one:.5f}, SGLang a rounding beside {other:.5f}"
        f"{'' if good else ': TOO FAR'}"
    )
    return good


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


def compare(arms: tuple[str, str], left_runs: list, right_runs: list) -> None:
    """Two arms' tokens, and what passed from step to step."""
    for left, right in zip(left_runs, right_runs, strict=False):
        print(f"{left['requests']} requests of {left['prompt']} tokens:")
        print(f"    {' and '.join(arms)}: {alike(left['tokens'], right['tokens'])}")
        for name, one in zip(arms, (left, right), strict=True):
            if one["step_ms"]:
                print(
                    f"    {name}: {one['step_ms'][0]:.3f} ms from piece to piece (P90"
                    f" {one['step_ms'][1]:.3f}) of {one['steps']} steps,"
                    f" {one['tokens_a_s']:.1f} tokens/s a user"
                )
            for what, words in one.get("graphs", {}).items():
                print(
                    f"    {name}: {what} {words['ms'][0]:.3f} ms (P90 {words['ms'][1]:.3f}) of"
                    f" {words['count']}"
                )
    # What another batch size does to the same prompts' tokens.
    for name, runs in zip(arms, (left_runs, right_runs), strict=True):
        for one, other in itertools.pairwise(runs):
            if one["prompt"] == other["prompt"]:
                print(
                    f"{name}: {one['requests']} and {other['requests']} requests of"
                    f" {one['prompt']} tokens: {alike(one['tokens'], other['tokens'])}"
                )


def graphs_of(folder: Path, name: str) -> Path:
    """Where every_arm.py leaves the times of an arm's graphs."""
    return folder / f"{name}.timed.jsonl"


def graph_times(folder: Path, name: str, number: int, size: int) -> dict[str, dict]:
    """Of a timed batch, of as many requests as it has: medians and P90 of the target's graph, of
    the draft's, and from the end of a target's to the end of the next."""
    path, found = graphs_of(folder, name), {"target": [], "draft": [], "step": []}
    for line in path.read_text().splitlines() if path.exists() else []:
        words = json.loads(line)
        if (words["batch"], words["requests"]) != (number, size):
            continue
        found[words["who"]].append(words["ms"])
        if words["who"] == "target" and words["since_ms"] is not None:
            found["step"].append(words["since_ms"])
    return {
        what: {"ms": [quantile(values, q) for q in (0.5, 0.9)], "count": len(values)}
        for what, values in found.items()
        if values
    }


def logits_of(folder: Path, name: str) -> Path:
    """Where every_arm.py leaves the logits of an arm's greedy requests."""
    return folder / f"{name}.logits.jsonl"


def partings(arms: tuple[str, str], both: list[list], folder: Path) -> bool:
    """Of each greedy request where the arms' tokens part; whether that is a near tie wherever
    verified rows of both say so."""
    steps = []
    for name in arms:
        path = logits_of(folder, name)
        lines = path.read_text().splitlines() if path.exists() else []
        steps.append([json.loads(line) for line in lines])
    good, bound = True, SPREADS_OF_A_TIE * declared_bound()
    for left, right in zip(*both, strict=False):
        number, prompt = left["greedy"], left["prompt"]
        tokens = [left["tokens"][0], right["tokens"][0]]
        count = min(map(len, tokens))
        at = next((i for i in range(count) if tokens[0][i] != tokens[1][i]), count)
        mine = [[step for step in found if step["request"] == number] for found in steps]
        pace = ", ".join(
            f"{(len(made) - 1) / max(len(taken), 1):.2f}"
            for made, taken in zip(tokens, mine, strict=True)
        )
        said = f"request {number}, {' and '.join(arms)} ({pace} tokens a step):"
        if at == count:
            print(f"{said} all {count} tokens equal")
            continue
        if at == 0:
            print(f"{said} parted at the first token, which the prompt's forward gives")
            continue
        rows = [
            row_before(found, made, prompt, at) for found, made in zip(mine, tokens, strict=True)
        ]
        if None in rows:
            print(f"{said} {at} of {count} tokens equal; no verified row of both tells why")
            good = False
            continue
        apart = sum(
            lead(row, made[at], other[at])
            for row, made, other in zip(rows, tokens, reversed(tokens), strict=True)
        )
        good &= apart <= bound
        leads = ", ".join(f"{lead_of_best(row):.3f}" for row in rows)
        print(
            f"{said} {at} of {count} tokens equal; the best logit led the second by {leads}, the"
            f" arms differ in the two by {apart:.3f} of a row's rms (a near tie: up to"
            f" {bound:.2f}){'' if apart <= bound else ': NO NEAR TIE'}"
        )
    leads = [lead_of_best(row) for found in steps for step in found for row in rows_of(step)]
    if leads:
        near = sum(value <= bound for value in leads) / len(leads)
        print(
            f"greedy rows of {' and '.join(arms)}: {len(leads)}, the best leads by"
            f" {statistics.median(leads):.3f} of the rms in the middle, by no more than"
            f" {bound:.2f} in {100 * near:.0f} %"
        )
    return good


def rows_of(step: dict):
    """The rows of a step that every_arm.py told of."""
    fields = ("ids", "positions", "tokens", "values", "rms")
    for values in zip(*(step[field] for field in fields), strict=True):
        yield dict(zip(fields, values, strict=True))


def row_before(steps: list[dict], made: list, prompt: int, at: int) -> dict | None:
    """The verified row that gave token `at` of a request's: behind the tokens before it."""
    for step in steps:
        behind = True
        for row in rows_of(step):
            place = row["positions"] - prompt
            behind &= 0 <= place < len(made) and row["ids"] == made[place]
            # Of equal ones the lowest token is taken, whichever comes first here.
            if behind and place == at - 1 and lead(row, made[at], row["tokens"][0]) == 0:
                return row
    return None


def lead(row: dict, token: int, other: int) -> float:
    """How far a row's logit of `token` lies over that of the other, by the rms of all. One that was
    not kept is no more than the last one that was."""
    values = dict(zip(row["tokens"], row["values"], strict=True))
    least = row["values"][-1]
    return (values.get(token, least) - values.get(other, least)) / row["rms"]


def lead_of_best(row: dict) -> float:
    return (row["values"][0] - row["values"][1]) / row["rms"]


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
    parser.add_argument("--trace", default="", help="batches whose kernels are told of")
    parser.add_argument("--repeats", type=int, default=1, help="of the timed batches")
    parser.add_argument("--accept", type=float, default=0.0, help="tokens that a step accepts")
    parser.add_argument("--greedy", type=int, default=0, help="prompts whose logits are compared")
    parser.add_argument("--chain", type=float, default=0.0, help="how sure the head is of the next")
    parser.add_argument("--crowd", type=int, default=0, help="requests that come and go")
    parser.add_argument("--fault", action="store_true", help="end the plugin's arm by an abort")
    parser.add_argument("--lock", type=Path, help="engines with the same file take turns")
    parser.add_argument("--together", action="store_true", help="arms start at once, take turns")
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
    for name, word in itertools.product(arms, ("warm", "ended")):
        word_of(args.out, name, word).unlink(missing_ok=True)
    with concurrent.futures.ThreadPoolExecutor(len(arms) if args.together else 1) as pool:
        results = dict(zip(arms, pool.map(lambda name: run_arm(name, args), arms), strict=True))
    good = all(results.values())
    if args.eager and (results.get("on") or args.fault):
        good &= beside((args.out / "on.log").read_text(errors="replace"))
    good &= compare_arms(arms, results, args.out)
    return 0 if good else 1


def compare_arms(arms: list[str], results: dict[str, list], folder: Path) -> bool:
    """Each two arms; whether their greedy tokens part at near ties alone."""
    good = True
    for pair in itertools.combinations(sorted(arms), 2):
        both = [results[name] for name in pair]
        if not all(both):
            continue
        compare(pair, *([run for run in runs if "greedy" not in run] for runs in both))
        greedy = [[run for run in runs if "greedy" in run] for runs in both]
        if greedy[0]:
            good &= partings(pair, greedy, folder)
    return good


if __name__ == "__main__":
    sys.exit(main())
