"""What each arm of engine.py has in its processes, with the plugin or without it. Nothing of lowlat
is imported here: one arm is a server that has never seen it. Variables of the environment:

    LOWLAT_TEST_RANKS=4      the model is one rank's share of so many
    LOWLAT_TEST_FREE=FILE    while this file exists the biases that choose experts are 0
    LOWLAT_TEST_LOGITS=FILE  while FILE exists, which says a request's number, the best logits of
                             each verified row that a graph ran go to FILE.jsonl
    LOWLAT_TEST_TIMED=FILE   while FILE exists, which says a batch's number, the times of graphs on
                             the GPU go to FILE.jsonl
    LOWLAT_TEST_TRACE=FILE   while FILE exists, which says how many requests, the kernels of some
                             steps of as many go to FILE.REQUESTS.json
"""

import collections
import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from dummy_weights import fill

RANKS = int(os.environ.get("LOWLAT_TEST_RANKS", "1"))
PADDED_HEADS = 64
BEST_LOGITS = 8
# A look at a file can take as long as many kernels: not every step has one. Prompts take longer.
LOOK_S = 0.01
TRACE_BEHIND, TRACED = 30, 4


class Switch:
    """A file that engine.py makes, and removes, between batches."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.looked, self.words = float("-inf"), None

    def read(self) -> str | None:
        """What is in the file, or None where there is none."""
        now = time.monotonic()
        if now - self.looked > LOOK_S:
            self.looked = now
            self.words = self.path.read_text() if self.path.exists() else None
        return self.words


def prepare() -> None:
    """An entry point. SGLang's own dummy weights are zeros in fp8, and leave fp4's bytes as they
    were."""
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = initialize
    tellings = {"LOGITS": telling_logits, "TIMED": telling_times, "TRACE": telling_kernels}
    for word, telling in tellings.items():
        if os.environ.get(f"LOWLAT_TEST_{word}"):
            from sglang.srt.model_executor.runner import decode_cuda_graph_runner

            runner = decode_cuda_graph_runner.DecodeCudaGraphRunner
            runner.execute = telling(runner.execute)


def initialize(model: Any) -> None:
    """Random weights whose products have the size of their inputs, the same in every process."""
    if RANKS > 1:
        for kind in {type(part) for part in model.modules()}:
            if hasattr(kind, "_local_attn_sink"):
                pad_heads(kind)
    # Buffers hold what follows from the configuration, but for a hash layer's table.
    tables = [(name, table) for name, table in model.named_buffers() if name.endswith("tid2eid")]
    for name, tensor in [*model.named_parameters(), *tables]:
        if tensor.numel():
            fill(name, tensor.detach())
    if os.environ.get("LOWLAT_TEST_FREE"):
        threading.Thread(target=free, args=[model], daemon=True).start()


def free(model: Any) -> None:
    """To compare, biases choose the experts: scores that lie close would choose others by the last
    bit of what came before. To time, scores choose."""
    path = Path(os.environ["LOWLAT_TEST_FREE"])
    for free in itertools.cycle((True, False)):
        if not wait_for(path, free):
            return
        for name, tensor in model.named_parameters():
            if name.endswith("e_score_correction_bias"):
                bias = tensor.detach()
                bias.zero_() if free else fill(name, bias)


def wait_for(path: Path, there: bool = True) -> bool:
    """Whether the file came in time, or went."""
    end = time.monotonic() + 3600
    while path.exists() != there:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def pad_heads(attention: type) -> None:
    """SGLang's attention kernels have 64 heads or more. Where ranks share them, SGLang pads a
    rank's and its sink; here the rank is alone."""

    def sink(self: Any, kernel_num_heads: int | None = None) -> Any:
        if self._attn_sink_local is None:
            self._attn_sink_local = self.attn_sink.new_zeros(PADDED_HEADS)
            self._attn_sink_local[: self.n_local_heads] = self.attn_sink
        return self._attn_sink_local[:kernel_num_heads]

    attention._kernel_num_heads = lambda self, num_tokens: PADDED_HEADS
    attention._local_attn_sink = sink


def telling_logits(execute: Any) -> Any:
    """A graph runner's own, with a line for each step of a request whose number the file says; of
    several ranks the first one tells."""
    from sglang.srt.runtime_context import get_parallel

    switch = Switch(os.environ["LOWLAT_TEST_LOGITS"])
    lines = switch.path.with_name(f"{switch.path.name}.jsonl")

    def run(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        out = execute(self, forward_batch, *args, **kwargs)
        mine = not self.model_runner.is_draft_worker and get_parallel().tp_rank == 0
        number = switch.read() if mine else None
        if number:
            rows = len(out.next_token_logits)
            inputs = self.buffers.input_ids[:rows], self.buffers.positions[:rows]
            words = best_logits(out.next_token_logits, *inputs)
            with lines.open("a") as file:
                print(json.dumps({"request": int(number)} | words), file=file)
        return out

    return run


def telling_times(execute: Any) -> Any:
    """A graph runner's own, with a line for each graph of a batch whose number the file says: what
    passed on the GPU around it, copies of its inputs within, and since the last one of its kind
    ended; of several ranks the first one tells."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    switch = Switch(os.environ["LOWLAT_TEST_TIMED"])
    lines = switch.path.with_name(f"{switch.path.name}.jsonl")
    pending: collections.deque = collections.deque()
    last: dict[str, Any] = {}
    # Kept open: a graph's line is one write of the host that launches the next one.
    file = lines.open("a", buffering=1)

    def run(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        number = switch.read()
        if not number or get_parallel().tp_rank != 0:
            last.clear()
            return execute(self, forward_batch, *args, **kwargs)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        out = execute(self, forward_batch, *args, **kwargs)
        end.record()
        who = "draft" if self.model_runner.is_draft_worker else "target"
        words = {"batch": int(number), "who": who, "requests": int(forward_batch.batch_size)}
        pending.append((words, start, end, last.get(who)))
        last[who] = end
        while pending and pending[0][2].query():
            words, start, end, before = pending.popleft()
            since = None if before is None else round(before.elapsed_time(end), 4)
            words |= {"ms": round(start.elapsed_time(end), 4), "since_ms": since}
            print(json.dumps(words), file=file)
        return out

    return run


def telling_kernels(execute: Any) -> Any:
    """A graph runner's own, with a profiler around some steps, drafts within, from a target's graph
    on."""
    import torch

    switch = Switch(os.environ["LOWLAT_TEST_TRACE"])
    seen: dict[str, int] = {}
    profilers: list[Any] = []

    def run(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        size = switch.read()
        if not size or self.model_runner.is_draft_worker:
            return execute(self, forward_batch, *args, **kwargs)
        if int(forward_batch.batch_size) == int(size):
            seen[size] = seen.get(size, 0) + 1
        if seen.get(size) == TRACE_BEHIND and not profilers:
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CUDA]
            profilers.append(torch.profiler.profile(activities=activities))
            profilers[0].start()
        if seen.get(size, 0) >= TRACE_BEHIND + TRACED and profilers:
            torch.cuda.synchronize()
            profiler = profilers.pop()
            profiler.stop()
            path = switch.path.with_name(f"{switch.path.name}.{size}.json")
            profiler.export_chrome_trace(str(path))
            path.write_text(json.dumps(kernels_of(json.loads(path.read_text()))))
        return execute(self, forward_batch, *args, **kwargs)

    return run


def kernels_of(trace: dict) -> list:
    """[name, stream, start, end] of what ran on the GPU, in the order of starts; microseconds."""
    found = [
        [event["name"], event["args"].get("stream"), event["ts"], event["ts"] + event["dur"]]
        for event in trace["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    found.sort(key=lambda event: event[2])
    first = found[0][2] if found else 0
    return [
        [name, stream, round(start - first, 3), round(end - first, 3)]
        for name, stream, start, end in found
    ]


def best_logits(logits: Any, input_ids: Any, positions: Any) -> dict[str, list]:
    """Of each row: its token and position, the best tokens with their logits, and the root mean
    square of all its logits."""
    values, tokens = logits.float().topk(BEST_LOGITS)
    return {
        "ids": input_ids.tolist(),
        "positions": positions.tolist(),
        "tokens": tokens.tolist(),
        "values": values.tolist(),
        "rms": logits.float().square().mean(-1).sqrt().tolist(),
    }
