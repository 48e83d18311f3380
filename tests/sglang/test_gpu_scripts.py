"""What the scripts for a GPU (tests/gpu/sglang) measure with, on the CPU: weights by hashes, inputs
a rounding beside, features of every layer, where two arms' tokens part, what graphs took, two
servers' turns. (Proved by hashes that begin at 0 in every part, by a forward that stays replaced,
by rows that are taken wherever their position fits, by biases that stay 0, and by turns that nobody
keeps.)
"""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOM = Path(__file__).resolve().parents[1] / "gpu" / "sglang"


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(ROOM))
    try:
        import dummy_weights
        import engine
        import every_arm
        import lowlat_few_gpus
    finally:
        sys.path.remove(str(ROOM))
    return dummy_weights, lowlat_few_gpus, engine, every_arm


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.3.mlp.experts.w13_weight", torch.int8, (6, 8, 64)),
        ("layers.3.self_attn.wq_b.weight", torch.float8_e4m3fn, (6, 8, 64)),
        ("layers.3.self_attn.wo_a.weight", torch.bfloat16, (6, 8, 64)),
        ("layers.3.hc_attn_fn", torch.float32, (6, 8, 64)),
    ],
)
def test_a_part_of_a_tensor_is_what_the_whole_has_there(scripts, name, dtype, shape) -> None:
    dummy_weights = scripts[0]
    whole, part = torch.empty(shape, dtype=dtype), torch.empty(shape[1:], dtype=dtype)
    dummy_weights.fill(name, whole)
    dummy_weights.fill(name, part, first=4 * part.numel())
    as_bytes = [tensor.contiguous().view(torch.uint8) for tensor in (whole[4], part, whole[3])]
    assert torch.equal(as_bytes[0], as_bytes[1]) and not torch.equal(as_bytes[0], as_bytes[2])


def test_weights_do_not_depend_on_the_dtype_that_a_model_is_loaded_with(scripts) -> None:
    dummy_weights = scripts[0]
    both = [torch.empty(4, 512, dtype=torch.float32) for _ in range(2)]
    dummy_weights.fill("hc_attn_fn", both[0])
    dummy_weights.quantiles.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        dummy_weights.fill("hc_attn_fn", both[1])
    finally:
        torch.set_default_dtype(torch.float32)
        dummy_weights.quantiles.cache_clear()
    assert torch.equal(*both)


def test_values_a_rounding_beside_are_neighbours(scripts) -> None:
    few_gpus = scripts[1]
    values = torch.randn(24, 4096).bfloat16()
    values[0, :8] = 0.0
    moved = few_gpus.a_rounding_beside(values)
    steps = moved.view(torch.int16).int() - values.view(torch.int16).int()
    assert set(steps.unique().tolist()) == {-1, 0, 1}
    assert 0.05 < float((steps != 0).float().mean()) < 0.075
    assert torch.equal(moved[0, :8], values[0, :8]) and not moved.isnan().any()


class Inner(torch.nn.Module):
    """As SGLang's model: features of the layers that the draft reads, each its number here."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(5))
        self.dspark_layers_to_capture = [2, 4]

    def forward(self, hidden):
        parts = [hidden + layer for layer in self.dspark_layers_to_capture]
        return (hidden, hidden), torch.cat(parts, -1)


def test_every_layers_features_come_beside_what_a_forward_gives(scripts) -> None:
    few_gpus = scripts[1]
    inner, hidden = Inner(), torch.zeros(3, 7)
    _, before = inner.forward(hidden)
    with few_gpus.every_layer(inner) as found:
        _, features = inner.forward(hidden)
    assert torch.equal(features, before)
    assert found[0].shape == (3, 5, 7) and found[0][0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(inner.forward(hidden)[1], before) and len(found) == 1


def test_differences_beyond_the_bounds_are_told(scripts, capsys) -> None:
    few_gpus, engine = scripts[1:3]
    step = dict(mode="target_verify", rows=6, best=1.0, moved_best=1.0, again_logits=[0.0, 0.0])
    near = step | dict(logits=[0.07, 0.1], moved_logits=[0.08, 0.1], layers=[0.0], moved_layers=[1])

    def log(words) -> str:
        return f"[now] {few_gpus.BESIDE}{engine.json.dumps(words)}\n"

    assert engine.beside(log(near))
    assert not engine.beside("nothing beside")
    assert not engine.beside(log(near | {"layers": [1.3]}))
    assert not engine.beside(log(near | {"layers": [float("nan")]}))
    assert not engine.beside(log(near | {"logits": [0.11, 0.2], "moved_logits": [0.1, 0.2]}))
    assert capsys.readouterr().out.count("TOO FAR") == 2


def test_a_chained_head_and_draft_expect_the_next_token(scripts, monkeypatch) -> None:
    dummy_weights = scripts[0]
    monkeypatch.setenv("LOWLAT_TEST_CHAIN", "1")
    vocab, hidden = 96, 512
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "markov_head.markov_w1.weight": (vocab, 256),
        "markov_head.markov_w2.weight": (vocab, 256),
    }
    made = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for name, tensor in made.items():
        dummy_weights.fill(name, tensor)
    embedding, head, first, second = (tensor.float() for tensor in made.values())
    following = torch.arange(1, vocab + 1) % vocab
    assert torch.equal((first @ second.T).argmax(-1), following)
    logits = embedding @ head.T
    expected = logits[torch.arange(vocab), following]
    assert float((logits.argmax(-1) == following).float().mean()) > 0.7
    # Of some tokens hardly more than of any other.
    assert float(expected.min()) < 0.2 * float(expected.max())


def test_the_best_logits_of_a_row_come_with_its_token_and_size(scripts) -> None:
    every_arm = scripts[3]
    logits = torch.zeros(2, 100)
    logits[0, 7], logits[0, 3], logits[1, 99] = 4.0, 3.0, 10.0
    words = every_arm.best_logits(logits, torch.tensor([5, 6]), torch.tensor([300, 301]))
    assert words["ids"] == [5, 6] and words["positions"] == [300, 301]
    assert words["tokens"][0][:2] == [7, 3] and words["values"][0][:2] == [4.0, 3.0]
    assert words["tokens"][1][0] == 99 and words["rms"] == pytest.approx([0.5, 1.0])


def test_a_switch_is_looked_at_now_and_then(scripts, tmp_path, monkeypatch) -> None:
    every_arm, now = scripts[3], [0.0]
    monkeypatch.setattr(every_arm.time, "monotonic", lambda: now[0])
    switch = every_arm.Switch(str(tmp_path / "on"))
    assert switch.read() is None
    switch.path.write_text("3")
    assert switch.read() is None
    now[0] += 2 * every_arm.LOOK_S
    assert switch.read() == "3"


def test_biases_are_zero_while_a_file_says_so(scripts, tmp_path, monkeypatch) -> None:
    every_arm, path = scripts[3], tmp_path / "free"
    monkeypatch.setenv("LOWLAT_TEST_FREE", str(path))
    monkeypatch.setenv("LOWLAT_TEST_BIAS", "4")
    model = torch.nn.Module()
    model.e_score_correction_bias = torch.nn.Parameter(torch.empty(64))
    every_arm.initialize(model)
    chosen = model.e_score_correction_bias.detach().clone()
    assert float(chosen.abs().max()) > 1

    def comes(values) -> bool:
        end = time.monotonic() + 20
        while not torch.equal(model.e_score_correction_bias.detach(), values):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    path.touch()
    assert comes(torch.zeros(64))
    path.unlink()
    assert comes(chosen)


class Event:
    """A GPU's, whose clock is a number that the test moves; done when the next one is there."""

    now, newest = 0.0, None

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at, Event.newest = Event.now, self

    def elapsed_time(self, end) -> float:
        return end.at - self.at

    def query(self) -> bool:
        return Event.newest is not self


def test_graphs_of_a_timed_batch_are_told_of(scripts, tmp_path, monkeypatch) -> None:
    engine, every_arm = scripts[2:]
    monkeypatch.setenv("LOWLAT_TEST_TIMED", str(tmp_path / "on.timed"))
    monkeypatch.setattr(every_arm, "LOOK_S", -1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(tp_rank=0)
    )

    def execute(self, forward_batch, took):
        Event.now += took
        return took

    run = every_arm.telling_times(execute)

    def step(requests: int, target: float, draft: float) -> None:
        for is_draft, took in ((True, draft), (False, target)):
            runner = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=is_draft))
            assert run(runner, SimpleNamespace(batch_size=requests), took) == took
        Event.now += 0.5

    step(2, 100.0, 100.0)
    (tmp_path / "on.timed").write_text("3")
    step(1, 50.0, 10.0)
    for took in (4.0, 5.0, 6.0):
        step(2, took, 1.0)
    (tmp_path / "on.timed").unlink()
    step(2, 100.0, 100.0)
    assert engine.graph_times(tmp_path, "on", 2, 2) == {}
    found = engine.graph_times(tmp_path, "on", 3, 2)
    # The last one is told of by the next graph of a timed batch.
    assert found["target"] == {"ms": [5.0, 5.0], "count": 2}
    assert found["step"] == {"ms": [6.5, 6.5], "count": 2}
    assert found["draft"]["ms"] == [1.0, 1.0]


class Profiler:
    """One that saw a kernel and what is none."""

    made = 0

    def __init__(self, activities) -> None:
        Profiler.made += 1

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    def export_chrome_trace(self, path) -> None:
        assert not self.is_on
        kernel = {"cat": "kernel", "ts": 7.5, "dur": 2.0, "args": {"stream": 7}}
        events = [kernel | {"name": "b"}, kernel | {"name": "a", "ts": 5}, {"cat": "cpu_op"}]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def test_kernels_of_some_steps_are_told_of(scripts, tmp_path, monkeypatch) -> None:
    every_arm = scripts[3]
    monkeypatch.setenv("LOWLAT_TEST_TRACE", str(tmp_path / "on.trace"))
    monkeypatch.setattr(every_arm, "LOOK_S", -1)
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    run = every_arm.telling_kernels(lambda self, forward_batch: forward_batch.batch_size)
    target = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=False))

    def steps(size: int, count: int) -> bool:
        batch = SimpleNamespace(batch_size=size)
        assert all(run(target, batch) == size for _ in range(count))
        return (tmp_path / "on.trace.8.json").exists()

    assert not steps(8, 100)
    (tmp_path / "on.trace").write_text("8")
    assert not steps(7, 100)
    assert not steps(8, every_arm.TRACE_BEHIND + every_arm.TRACED - 1)
    assert steps(8, 100) and Profiler.made == 1
    found = json.loads((tmp_path / "on.trace.8.json").read_text())
    assert found == [["a", 7, 0, 2], ["b", 7, 2.5, 4.5]]


def test_two_arms_meet_and_take_turns(scripts, tmp_path) -> None:
    engine, seen = scripts[2], []

    def arm(name: str, limit: float = 20) -> SimpleNamespace:
        return SimpleNamespace(
            arm=name, arms="on,off", out=tmp_path, limit=limit, lock=None, together=True
        )

    with pytest.raises(TimeoutError, match="the arm off is not warm"):
        engine.meet(arm("on", limit=0))

    def batches(name: str) -> None:
        engine.meet(arm(name))
        for _ in range(3):
            with engine.alone(arm(name)):
                seen.append((name, "begins"))
                time.sleep(0.02)
                seen.append((name, "ends"))

    threads = [threading.Thread(target=batches, args=[name]) for name in ("on", "off")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 12
    for (one, begins), (other, ends) in zip(seen[::2], seen[1::2], strict=True):
        assert one == other and (begins, ends) == ("begins", "ends")
    # One that has ended is not waited for.
    (tmp_path / "off.warm").unlink()
    (tmp_path / "off.ended").touch()
    engine.meet(arm("on", limit=0.0))


def test_what_an_arm_has_done_is_kept_at_once(scripts, tmp_path) -> None:
    engine, runs = scripts[2], []
    args = SimpleNamespace(out=tmp_path, arm="on")
    for number in range(2):
        engine.keep(args, runs, {"requests": number})
        assert len(json.loads((tmp_path / "on.json").read_text())) == number + 1


def test_tokens_part_at_near_ties_alone(scripts, tmp_path, capsys) -> None:
    engine = scripts[2]

    def step(ids: list, second: int, lead: float, at: int) -> dict:
        """A verified step whose row `at` has the tokens 20 and `second` apart by `lead`."""
        tokens = [[50 + row, 60] for row in range(len(ids))]
        tokens[at] = [20, second] if lead > 0 else [second, 20]
        return {
            "request": 0,
            "ids": ids,
            "positions": [300 + i for i in range(len(ids))],
            "tokens": tokens,
            "values": [[8.0, 8.0 - abs(lead)]] * len(ids),
            "rms": [2.0] * len(ids),
        }

    def parted(lead: float) -> bool:
        # A step whose row at that place is behind a token that was not taken, then the one that is.
        wrong = step([10, 12, 13], 21, 5.0, 1)
        for name, own in (("off", 0.2), ("on", -lead)):
            lines = [json.dumps(one) for one in (wrong, step([10, 11, 13], 21, own, 1))]
            engine.logits_of(tmp_path, name).write_text("\n".join(lines))
        run = {"greedy": 0, "prompt": 300}
        runs = [[run | {"tokens": [[10, 11, last, 9]]}] for last in (20, 21)]
        return engine.partings(("off", "on"), runs, tmp_path)

    assert parted(0.4)
    told = capsys.readouterr().out
    assert "2 of 4 tokens equal; the best logit led the second by 0.100, 0.200" in told
    assert "differ in the two by 0.300" in told
    assert not parted(2.0) and "NO NEAR TIE" in capsys.readouterr().out


def test_a_server_without_the_flag_has_the_plugins_own_entry_point_or_none(
    scripts, tmp_path
) -> None:
    """Whatever an installed lowlat offers."""
    engine = scripts[2]
    installed = tmp_path / "installed"
    info = installed / "lowlat-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lowlat\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nnvidia_megakernel = installed:f\n"
    )

    def offered(name: str) -> set[str]:
        path = [str(engine.offer(tmp_path, name)), str(installed)]
        words = f"import sys; sys.path[:0] = {path}; from importlib.metadata import entry_points"
        ask = "print(*(e.value for e in entry_points(group='sglang.srt.plugins')), sep='\\n')"
        command = [sys.executable, "-c", f"{words}; {ask}"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return {value for value in told.stdout.split() if "every_arm" not in value}

    assert offered("on") == {"lowlat_few_gpus:register_nvidia"}
    assert offered("off") == {"lowlat.plugin:register_nvidia"}
    assert offered("bare") == set()
