"""The watch over the status words: a rank whose peer does not come is logged, and stops the server.
(Proved by never looking, and by looking at the kernel's name alone.)
"""

import json
import logging
import threading
import time

import numpy as np
import pytest

kernels = pytest.importorskip("lowlat._kernels", reason="lowlat is not built (make build)")
dispatch = pytest.importorskip("lowlat._dispatch", reason="lowlat is not built (make build)")

from lowlat import watch  # noqa: E402 (after it is known that lowlat is built)

WAIT_NS = 200_000_000
BUDGET_S = 20
BATCH = 2


def ranks() -> list:
    """Two ranks for proposals, with weights of zeros."""
    facts = json.loads(dispatch.kernel_config(dispatch.built_in("tiny-v41")))
    models, kept = [], []
    for rank in range(2):
        config = facts | {
            "tp_rank": rank,
            "tp_size": 2,
            "widths": [BATCH * facts["draft_block"]],
            "max_batch": BATCH,
            "max_rows": BATCH * facts["draft_block"],
            "page_size": 64,
            "num_pages": 2,
            "wait_budget_ns": WAIT_NS,
        }
        hosting = {"expert_layout": "row_major", "bf16_wo_a": 0, "proposals": 1}
        model = kernels.HostedModel("scalar", config, hosting)
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


def propose(model, facts) -> list:
    arrays = [
        np.zeros((BATCH * facts["draft_block"], facts["hidden"]), np.uint16),
        np.zeros(BATCH, np.int64),
        np.zeros((BATCH, facts["draft_block"]), np.int64),
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


def test_a_peer_that_does_not_come_is_logged_and_stops_the_server(caplog) -> None:
    facts = json.loads(dispatch.kernel_config(dispatch.built_in("tiny-v41")))
    (models, kept), stopped = ranks(), threading.Event()
    guard = watch.Watch(models[0], 0, stopped.set)
    with caplog.at_level(logging.CRITICAL):
        start = time.monotonic()
        held = propose(models[0], facts)
        assert stopped.wait(BUDGET_S), "the fault was not seen"
        assert time.monotonic() - start >= WAIT_NS / 1e9
    guard.stop()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "lowlat: rank 0 waited in vain for rank 1 in draft_token_gather of draft"
    )
    with pytest.raises(RuntimeError, match="for rank 1"):
        models[0].synchronize(int(BUDGET_S * 1e9))
    assert held and kept


def test_healthy_ranks_are_left_alone(caplog) -> None:
    facts = json.loads(dispatch.kernel_config(dispatch.built_in("tiny-v41")))
    (models, kept), stopped = ranks(), threading.Event()
    watches = [watch.Watch(model, rank, stopped.set) for rank, model in enumerate(models)]
    held = [propose(model, facts) for model in models]
    for model in models:
        model.synchronize(int(BUDGET_S * 1e9))
    for one in watches:
        one.stop()
    assert not stopped.is_set() and not caplog.records
    assert np.array_equal(held[0][2], held[1][2])
    assert kept


def test_every_state_has_its_words() -> None:
    status = {"state": 2, "kernel": 1, "stage": "moe_sum", "peer": 3, "epoch": 17}
    catalogue = "front scalar\nback scalar\n"
    line = watch.words(status, catalogue, 1)
    assert "rank 1 was ended by rank 3 in moe_sum of back, exchange 17" in line
    assert "was aborted" in watch.words(status | {"state": 3, "kernel": 9}, catalogue, 1)
