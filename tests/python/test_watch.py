"""The watch over the status words: a rank whose peer does not come is logged, leaves a post-mortem
and stops the server. (Proved by a post-mortem that was opened and not written, and by layers that
were counted from 1.)
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

kernels = pytest.importorskip("lowlat._kernels", reason="lowlat is not built (make build)")
pytest.importorskip("lowlat._dispatch", reason="lowlat is not built (make build)")

from lowlat import watch  # noqa: E402 (after it is known that lowlat is built)
from support import fault_server, small_model  # noqa: E402

BUDGET_S = fault_server.BUDGET_S
LINE = "lowlat: rank 0 waited in vain for rank 1 in draft_token_gather of draft, exchange "


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWLAT_FAULT_DIR", str(tmp_path))
    return tmp_path


def watched(model, rank):
    return watch.Watch(model, model, rank=rank, facts={"mode": "draft"}, stop_pid=0)


def test_a_peer_that_does_not_come_is_logged_with_a_post_mortem(folder, capfd) -> None:
    models, kept = fault_server.ranks()
    one = watched(models[0], 0)
    one.captured({"mode": "draft", "batch_size": 2, "rows": 10})
    held = fault_server.propose(models[0])
    end = time.monotonic() + BUDGET_S
    while not one.native.has_seen_fault:
        assert time.monotonic() < end, "the fault was not seen"
        time.sleep(0.002)
    one.stop()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(LINE)
    assert line.endswith(f"; its rows are NaN and the server stops (post-mortem: {one.path})")
    told = json.loads(one.path.read_text())
    assert one.path == folder / f"lowlat-fault-{os.getpid()}-rank0-draft.json"
    assert line.startswith(told["words"]) and told["rank"] == 0
    status = told["status"]
    assert (status["state"], status["peer"], status["stage"]) == (1, 1, "draft_token_gather")
    assert status == models[0].status()
    assert told["about"]["captured"] == [{"mode": "draft", "batch_size": 2, "rows": 10}]
    assert told["about"]["catalogue_digest"] == f"{models[0].catalogue_digest:016x}"
    assert {"lowlat", "sglang"} <= set(told["about"])
    with pytest.raises(RuntimeError, match="for rank 1"):
        models[0].synchronize(int(BUDGET_S * 1e9))
    assert held and kept


def test_a_host_that_aborts_idle_kernels_is_told_too(folder, capfd) -> None:
    """Launches are refused from then on, so that none would say it."""
    models, kept = fault_server.ranks()
    one = watched(models[0], 0)
    models[0].abort()
    end = time.monotonic() + BUDGET_S
    while not one.native.has_seen_fault:
        assert time.monotonic() < end, "the abort was not seen"
        time.sleep(0.002)
    one.stop()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("lowlat: rank 0 was aborted between two launches, exchange 0;")
    told = json.loads(one.path.read_text())
    assert (told["status"]["state"], told["status"]["peer"]) == (3, -1)
    with pytest.raises(RuntimeError, match="aborted; make a new one"):
        fault_server.propose(models[0])
    assert kept


def targets():
    """Two ranks of a small target in an engine that keeps caches and head: weights and caches of
    zeros, two requests of 6 rows."""
    small, models, kept = small_model.MODELS["short"].config, [], []

    def zeros(shape, dtype):
        kept.append(np.zeros(shape, DTYPES.get(dtype, np.uint8)))
        return kept[-1].ctypes.data, list(shape), dtype

    for rank in range(2):
        config = {name: value for name, value in small.items() if name != "num_widths"} | {
            "tp_rank": rank,
            "tp_size": 2,
            "widths": [12],
            "max_batch": 2,
            "max_rows": 12,
            "wait_budget_ns": fault_server.WAIT_NS,
        }
        hosting = {"expert_layout": "row_major", "bf16_wo_a": 0, "proposals": 0, "stages": 0}
        model = kernels.HostedModel("scalar", config, hosting)
        for spec in model.tensors():
            if not spec["pool"]:
                model.bind(spec["name"], zeros(spec["shape"], spec["dtype"]))
        models.append(model)
    for rank, model in enumerate(models):
        model.peer_import(1 - rank, models[1 - rank].peer_export())
    for model in models:
        model.ready()
        pools = [spec for spec in model.tensors() if spec["pool"]]
        model.bind_pools(
            num_pages=PAGES,
            num_window_pages=PAGES,
            num_requests=PAGES,
            window_slots=zeros([PAGES * small["page_size"]], "i64")[0],
            history=zeros([PAGES, 3], "i32")[0],
            split_index=False,
            pools=[
                (
                    spec["name"],
                    zeros([PAGES * small["state_ring"], *spec["shape"][1:]], spec["dtype"]),
                )
                for spec in pools
            ],
        )
    return models, kept, zeros


DTYPES = {"bf16": np.uint16, "f32": np.float32, "i32": np.int32, "i64": np.int64}
PAGES = 4


def test_rows_of_a_step_that_ends_by_a_fault_are_nan(folder, capfd) -> None:
    """So that no plausible token leaves: the head makes logits of NaN of them."""
    models, kept, zeros = targets()
    sizes = small_model.MODELS["short"].config
    one = watch.Watch(models[0], models[0], rank=0, facts={"mode": "target_verify"}, stop_pid=0)
    hidden = np.ones((12, sizes["hidden"]), np.uint16)
    stages = sizes["num_draft_stages"]
    features = zeros([12, stages * sizes["hidden"]], "bf16")[0] if stages else 0
    models[0].step(
        mode="target_verify",
        batch_size=2,
        tokens_per_request=6,
        page_table_stride=PAGES,
        num_table_pages=PAGES,
        token_ids=zeros([12], "i64")[0],
        positions=zeros([12], "i64")[0],
        slots=zeros([12], "i64")[0],
        requests=zeros([2], "i64")[0],
        page_table=zeros([2, PAGES], "i32")[0],
        hidden=hidden.ctypes.data,
        features=features,
        streams=0 if stages else zeros([12, 4 * sizes["hidden"]], "bf16")[0],
        stream=0,
    )
    end = time.monotonic() + BUDGET_S
    while not one.native.has_seen_fault:
        assert time.monotonic() < end, "the fault was not seen"
        time.sleep(0.002)
    with pytest.raises(RuntimeError, match="for rank 1"):
        models[0].synchronize(int(BUDGET_S * 1e9))
    one.stop()
    values = (hidden.astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(values).all() and np.isnan(values @ np.ones(sizes["hidden"], np.float32)).all()
    assert "lowlat: rank 0 waited in vain for rank 1 in " in capfd.readouterr().err
    assert json.loads(one.path.read_text())["status"]["peer"] == 1
    assert kept


def test_the_scheduler_stops_its_server_though_its_interpreter_is_busy(tmp_path) -> None:
    told = json.loads(
        subprocess.run(
            [sys.executable, fault_server.__file__, str(tmp_path)],
            stdout=subprocess.PIPE,
            timeout=3 * BUDGET_S,
            check=True,
        ).stdout
    )
    assert told["stopped"] and told["by_scheduler"]
    # The file was there before the signal.
    (path,) = tmp_path.iterdir()
    assert path.name == f"lowlat-fault-{told['scheduler']}-rank0-draft.json"
    assert json.loads(path.read_text())["words"].startswith(LINE)


def test_a_folder_that_is_not_there_is_said_and_stops_no_less(monkeypatch, capfd) -> None:
    monkeypatch.setenv("LOWLAT_FAULT_DIR", "/nowhere")
    models, kept = fault_server.ranks()
    one = watched(models[0], 0)
    held = fault_server.propose(models[0])
    end = time.monotonic() + BUDGET_S
    while not one.native.has_seen_fault:
        assert time.monotonic() < end, "the fault was not seen"
        time.sleep(0.002)
    one.stop()
    assert f"(no post-mortem at {one.path}: No such file" in capfd.readouterr().err
    assert held and kept


def test_healthy_ranks_are_left_alone(folder, capfd) -> None:
    models, kept = fault_server.ranks()
    watches = [watched(model, rank) for rank, model in enumerate(models)]
    held = [fault_server.propose(model) for model in models]
    for model in models:
        model.synchronize(int(BUDGET_S * 1e9))
    for one in watches:
        one.stop()
        assert not one.native.has_seen_fault
    assert capfd.readouterr().err == "" and not list(Path(folder).iterdir())
    assert np.array_equal(held[0][2], held[1][2])
    assert kept


def test_every_state_has_its_words() -> None:
    catalogue = "front scalar\nback scalar\nstep nvidia fused\n"
    status = dict(state=2, kernel=1, stage=0, peer=3, place=0, epoch=17, catalogue=catalogue)
    line = kernels.Watch.words(**status, rank=1)
    assert line.startswith("lowlat: rank 1 was ended by rank 3 between two launches, exchange 17;")
    aborted = kernels.Watch.words(**status | {"state": 3, "kernel": 9, "stage": 1}, rank=1)
    assert aborted.startswith("lowlat: rank 1 was aborted in ") and " of unknown, " in aborted
    # A kernel of the fused schedule, and a gate, of layers that the words count from 1.
    kernel = kernels.Watch.words(**status | {"kernel": 2, "place": 16 * 3 + 5}, rank=0)
    assert ", kernel 5 of layer 2, exchange 17;" in kernel
    gate = kernels.Watch.words(**status | {"kernel": 2, "place": 0x1000 + 32 * 40 + 7}, rank=0)
    assert ", gate 7 of layer 39, exchange 17;" in gate
    begin = kernels.Watch.words(**status | {"kernel": 2, "place": 4}, rank=0)
    assert ", kernel 4 of the step's begin, exchange 17;" in begin
