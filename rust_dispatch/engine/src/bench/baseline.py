"""One rank of the baseline of `lowlat bench dispatch`: a Python `plan` call, and a vote by
`all_gather_object` over gloo. Rank 0 prints what they take as JSON.

    python baseline.py RANK SIZE VOTES WARM_UP STORE
"""

import bisect
import json
import os
import sys
import time
from datetime import timedelta

BUDGET = timedelta(seconds=60)
DECISIONS = 20_000


class Planner:
    """Which captured graph runs a step, from what a plugin's `plan` reads: mode, batch, rows."""

    def __init__(self, batch_sizes):
        self.tables = {
            ("target_verify", 6): (batch_sizes, {n: f"verify-{n}" for n in batch_sizes}),
            ("draft", 5): (batch_sizes, {n: f"draft-{n}" for n in batch_sizes}),
        }
        self.disarmed = None
        self.covered = {}
        self.uncovered = {}

    def plan(self, step):
        if self.disarmed is not None:
            return self._plain("disarmed")
        table = self.tables.get((step["mode"], step["tokens_per_request"]))
        if table is None:
            return self._plain(step["mode"])
        batch_size = step["batch_size"]
        if batch_size * step["tokens_per_request"] != step["rows"]:
            return self._plain("rows_ragged")
        sizes, graphs = table
        place = bisect.bisect_left(sizes, batch_size)
        if place == len(sizes):
            return self._plain("batch_too_large")
        key = graphs[sizes[place]]
        self.covered[key] = self.covered.get(key, 0) + 1
        return key, sizes[place]

    def _plain(self, reason):
        self.uncovered[reason] = self.uncovered.get(reason, 0) + 1
        return None, reason


def step(mode, batch_size, tokens):
    rows = batch_size * tokens
    return {"mode": mode, "batch_size": batch_size, "tokens_per_request": tokens, "rows": rows}


def stats(samples):
    samples.sort()
    at = [samples[round((len(samples) - 1) * share)] for share in (0.5, 0.99)]
    return {"ns_median": at[0], "ns_p99": at[1], "samples": len(samples)}


def time_plan():
    planner = Planner(list(range(1, 9)))
    steps = [
        *(step("target_verify", 1, 6), step("draft", 1, 5), step("target_verify", 1, 6)),
        *(step("draft", 3, 5), step("target_verify", 3, 6), step("draft", 8, 5)),
        *(step("target_verify", 8, 6), step("extend", 1, 128)),
    ]
    samples = []
    for _ in range(DECISIONS // 32):
        began_at = time.perf_counter_ns()
        for _ in range(4):
            for facts in steps:
                planner.plan(facts)
        samples.append((time.perf_counter_ns() - began_at) / 32)
    return stats(samples)


def time_gloo(rank, size, votes, warm_up, store):
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=BUDGET
    )
    samples = []
    for number in range(warm_up + votes):
        answers = [None] * size
        began_at = time.perf_counter_ns()
        dist.all_gather_object(answers, number)
        agreed = all(answer == number for answer in answers)
        if number >= warm_up:
            samples.append(float(time.perf_counter_ns() - began_at))
        if not agreed:
            raise SystemExit(f"ranks differ: {answers}")
    dist.destroy_process_group()
    return stats(samples)


def main():
    rank, size, votes, warm_up = map(int, sys.argv[1:5])
    report = {"plan": None, "gloo": None, "why": None}
    try:
        report["gloo"] = time_gloo(rank, size, votes, warm_up, sys.argv[5])
    except ImportError as error:
        report["why"] = f"{sys.executable}: {error}"
    if rank == 0:
        report["plan"] = time_plan()
        print(json.dumps(report))


main()
