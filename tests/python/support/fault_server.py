"""Two ranks for proposals whose second never comes, and the server that ends of it.

    python fault_server.py FOLDER

The server starts a scheduler, which is this program again, and waits for SIGQUIT; it prints who
sent it, and how long after the launch it came.
"""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
from lowlat import _dispatch, _kernels

WAIT_NS = 200_000_000
BUDGET_S = 20
BATCH = 2


def facts() -> dict:
    return json.loads(_dispatch.kernel_config(_dispatch.built_in("tiny-v41")))


def ranks() -> list:
    """Two ranks for proposals, with weights of zeros."""
    sizes, models, kept = facts(), [], []
    for rank in range(2):
        config = sizes | {
            "tp_rank": rank,
            "tp_size": 2,
            "widths": [BATCH * sizes["draft_block"]],
            "max_batch": BATCH,
            "max_rows": BATCH * sizes["draft_block"],
            "page_size": 64,
            "num_pages": 2,
            "wait_budget_ns": WAIT_NS,
        }
        hosting = {"expert_layout": "row_major", "bf16_wo_a": 0, "proposals": 1, "stages": 0}
        model = _kernels.HostedModel("scalar", config, hosting)
        for spec in model.tensors():
            array = np.zeros(spec["shape"], np.uint16)
            kept.append(array)
            model.bind(spec["name"], (array.ctypes.data, spec["shape"], spec["dtype"]))
        models.append(model)
    for rank, model in enumerate(models):
        model.peer_import(1 - rank, models[1 - rank].peer_export())
    for model in models:
        model.ready()
    return [models, kept]


def propose(model) -> list:
    sizes = facts()
    arrays = [
        np.zeros((BATCH * sizes["draft_block"], sizes["hidden"]), np.uint16),
        np.zeros(BATCH, np.int64),
        np.zeros((BATCH, sizes["draft_block"]), np.int64),
    ]
    hidden, anchors, tokens = (array.ctypes.data for array in arrays)
    model.propose(
        batch_size=BATCH,
        hidden=hidden,
        anchors=anchors,
        temperature=0,
        noise_offset=0,
        noise_key=0,
        draft_tokens=tokens,
        draft_logits=0,
        stream=0,
    )
    return arrays


def scheduler() -> None:
    from lowlat.watch import Watch

    models, kept = ranks()
    watch = Watch(models[0], models[0], rank=0, facts={"mode": "draft", "tp_size": 2})
    print(f"launched {time.monotonic_ns()}", flush=True)
    held = propose(models[0])
    # The interpreter is busy, as a scheduler is: the watch needs none.
    end = time.monotonic() + BUDGET_S
    while time.monotonic() < end and held and kept:
        sum(range(100_000))
    watch.stop()


def server(folder: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
    child = subprocess.Popen(
        [sys.executable, __file__, folder, "scheduler"],
        env=os.environ | {"LOWLAT_FAULT_DIR": folder},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        got = signal.sigtimedwait({signal.SIGQUIT}, BUDGET_S)
        seen = time.monotonic_ns()
    finally:
        child.kill()
    out, _ = child.communicate(timeout=BUDGET_S)
    launched = int(out.split()[1])
    told = {
        "stopped": got is not None,
        "by_scheduler": got is not None and got.si_pid == child.pid,
        "scheduler": child.pid,
        "ms_after_deadline": (seen - launched - WAIT_NS) / 1e6,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    scheduler() if sys.argv[2:] == ["scheduler"] else server(sys.argv[1])
