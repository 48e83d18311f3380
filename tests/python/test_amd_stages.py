"""The code objects of every stage, run: each operation within what the scalar platform declares,
bit for bit where neither the matrix unit nor a function of a library is in it; products,
collectives, hand-offs between blocks and the exchange between ranks; and products and the exchange
with a line of their machine code changed.

It is the machine code for gfx942 and gfx950 that runs, on our interpreter: no AMD GPU was there.
"""

import re
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from oracle import OPS
from oracle.cases import SHAPES, make
from oracle.compare import check_declared, check_exact
from oracle.run import bounds, run
from support import amd_machine as amd
from support.amd_ops import Stages

# exp, log, sin and their like are the platform's own: bits may differ from the host's library.
EXACT = {
    *("hc_combine_norm", "hc_post", "rms_norm", "head_norm", "rank_sum", "block_linear"),
    *("kv_pack", "kv_unpack", "candidate_blocks", "engram_hash", "engram_lookup", "accept"),
}
# Rows of an operation's shapes that are run: two with make test, all with make test-deep.
NUM_SHAPES = 2
BUDGET_NS = 300_000
RAN: set[tuple[str, str]] = set()  # part and kernel


def shapes(model, op):
    """Without candidate blocks: the kernel of a selection takes all positions."""
    fitting = [shape for shape in SHAPES[model][op][1] if "M" not in shape]
    return fitting if amd.DEEP else fitting[:NUM_SHAPES]


OPERATIONS = [(model, op) for model in SHAPES for op in SHAPES[model]]


@pytest.fixture(scope="module", params=amd.ISAS)
def code(request):
    try:
        return amd.stages(request.param)
    except amd.NoToolsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def stages(code):
    """Its functions of one argument err in the last place, one way or the other."""

    class Noted(Stages):
        def run(self, kernel, blocks, *arguments):
            super().run(kernel, blocks, *arguments)
            RAN.add((code.isa, f"lowlat_stage_{kernel}"))

    return Noted(code, seed=2, approximate=5)


@pytest.mark.parametrize("model, op", OPERATIONS)
def test_operations_are_within_their_bounds(stages, model, op):
    for shape in shapes(model, op):
        arrays = make(op, 1, model, **shape)
        got = getattr(stages, op)(arrays, model)
        want = OPS[model][op](arrays)
        check_declared(op, arrays, got, want, bounds(op, "scalar", model), model)
        if op in EXACT:
            for name, values in run(op, "scalar", arrays, model).items():
                check_exact(f"{op}: {name}", got[name], values)


# ------------------------------------------------------------------ arithmetic


def ulps(got, want):
    unit = np.spacing(np.abs(want.astype(np.float32))).astype(np.float64)
    return (np.abs(got.astype(np.float64) - want) / unit).max()


@pytest.mark.parametrize(
    "function, of, low, high, most",
    [
        (0, np.exp, -80, 80, 1),
        (1, np.log, 1e-6, 1e6, 1),
        (2, np.log1p, 1e-6, 50, 2),
        (3, np.sin, -1e6, 1e6, 1),
        (4, np.cos, -1e6, 1e6, 1),
        (5, np.sqrt, 0, 1e30, 0.5),
        (6, lambda x: 1 / np.sqrt(x), 1e-6, 1e30, 1.5),
    ],
)
def test_functions_of_the_platform(stages, function, of, low, high, most):
    x = np.random.default_rng(function).uniform(low, high, 512).astype(np.float32)
    out = stages.get((512,), np.float32)
    stages.run("math", 2, out, x, x, function, 512)
    assert ulps(out.read(), of(x.astype(np.float64))) <= most + 0.01


def test_division_and_products_round_where_ieee_says(stages):
    rng = np.random.default_rng(5)
    x, y = (
        (rng.standard_normal(512) * 2.0 ** rng.integers(-60, 60, 512)).astype(np.float32)
        for _ in range(2)
    )
    want = {7: x / y, 9: (x.astype(np.float64) * y + x).astype(np.float32), 10: x * y + x}
    for function, values in want.items():
        out = stages.get((512,), np.float32)
        stages.run("math", 2, out, x, y, function, 512)
        if function == 9:  # float64 holds the product, and its sum to well below a rounding
            assert ulps(out.read(), values) <= 1
        else:
            check_exact(str(function), out.read(), values)
    out = stages.get((512,), np.float32)
    stages.run("math", 2, out, np.abs(x), rng.uniform(-2, 2, 512).astype(np.float32), 8, 512)
    assert np.isfinite(out.read()).all()


def test_formats(stages):
    rng = np.random.default_rng(6)
    x = (rng.standard_normal(512) * 2.0 ** rng.integers(-9, 7, 512)).astype(np.float32)
    x[:6] = [0.0, -0.0, 448.0, -448.0, 6.0, 2.5]
    x = np.clip(x, -448, 448)
    bf16, e4m3 = stages.get((512,), np.uint16), stages.get((512,), np.uint8)
    e2m1, back = stages.get((512,), np.uint8), stages.get((512, 3), np.float32)
    stages.run("formats", 2, bf16, e4m3, e2m1, back, x, 512)
    wide, eight = x.astype(ml_dtypes.bfloat16), x.astype(ml_dtypes.float8_e4m3fn)
    four = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(bf16.read(), wide.view(np.uint16))
    assert np.array_equal(e4m3.read(), eight.view(np.uint8))
    want = np.stack([one.astype(np.float32) for one in (wide, eight, four)], axis=1)
    assert np.array_equal(back.read(), want)


def test_collectives(stages):
    x = np.random.default_rng(7).standard_normal(256).astype(np.float32)
    out, warp = stages.get((4,), np.float32), stages.get((4, 2), np.float32)
    ballot = stages.get((4,), np.uint64)
    stages.run("collectives", 1, out, warp, ballot, x)
    seen, waves = out.read(), x.reshape(4, 64)
    assert abs(seen[0] - x.sum()) < 1e-4 and seen[1] == x.max() and seen[2] == 1.0
    np.testing.assert_allclose(warp.read()[:, 0], waves.sum(1), rtol=1e-4, atol=1e-5)
    assert np.array_equal(warp.read()[:, 1], waves.max(1))
    want = [sum(1 << lane for lane in range(64) if wave[lane] < 0) for wave in waves]
    assert [int(one) for one in ballot.read()] == want


def test_the_drafts_feature(stages):
    streams = np.random.default_rng(8).standard_normal((3, 4, 96)).astype(ml_dtypes.bfloat16)
    out = stages.get((3, 96), np.uint16)
    stages.run("draft_feature", 3, out, streams.view(np.uint16), 96)
    want = (streams.astype(np.float32).sum(1) * np.float32(0.25)).astype(ml_dtypes.bfloat16)
    assert np.array_equal(out.read(), want.view(np.uint16))


# ------------------------------------------------------------------ linears and the matrix unit


def codes(rng, *shape):
    """e4m3 codes of moderate numbers."""
    return rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def fp4_values(packed):
    low, high = (packed & 15), packed >> 4
    both = np.stack([low, high], axis=-1).reshape(*packed.shape[:-1], -1).astype(np.uint8)
    return both.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def ue8m0(bytes_):
    return np.exp2(bytes_.astype(np.float64) - 127)


# Of fp32 sums in any order, relative to the largest output: declared in docs/numerics.md.
ORDER_BOUND = 2e-6


def product(stages, kind, rows, k, outputs=48):
    """y of a linear as tiles, and what it is in float64. A row of scales lies behind the last."""
    rng = np.random.default_rng([9, rows, k])
    x = rng.standard_normal((rows, k)).astype(ml_dtypes.bfloat16).astype(np.float32)
    if kind == "bf16":
        w = rng.standard_normal((outputs, k)).astype(ml_dtypes.bfloat16)
        weights, values = (w.view(np.uint16),), w.astype(np.float64)
    elif kind == "fp8":
        w = codes(rng, outputs, k)
        w[0, :4], w[1, :4] = [0x80, 0x01, 0x87, 0x7E], [0x00, 0x08, 0xFE, 0x81]
        scales = rng.integers(118, 132, (-(-outputs // 32) + 1, k // 32)).astype(np.uint8)
        whole = np.kron(ue8m0(scales), np.ones((32, 32)))[:outputs]
        weights = (w, scales, 32)
        values = w.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * whole
    else:
        w = rng.integers(0, 256, (outputs, k // 2)).astype(np.uint8)
        scales = rng.integers(118, 132, (outputs + 1, k // 32)).astype(np.uint8)
        weights = (w, scales)
        values = fp4_values(w) * np.repeat(ue8m0(scales[:outputs]), 32, axis=1)
    return stages.linear(kind, x, rows, k, outputs, *weights), x.astype(np.float64) @ values.T


def relative(y, want):
    return np.abs(y - want).max() / np.abs(want).max()


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp4"])
def test_linears_as_tiles(stages, kind):
    """Whole stretches of the block's four waves, more of them, parts of one; more rows than one
    tile has."""
    for rows, k in [(1, 32), (6, 512), (8, 96), (19, 2336)]:
        assert relative(*product(stages, kind, rows, k)) <= ORDER_BOUND, (rows, k)


def test_linears_of_any_scale_keep_their_chains(stages):
    rng = np.random.default_rng(8)
    x, w = rng.standard_normal((5, 256)).astype(np.float32), codes(rng, 48, 256)
    scales = rng.uniform(0.01, 2, (2, 8)).astype(np.float32)
    y = stages.linear("fp8_f32", x, 5, 256, 48, w, scales, 32)
    whole = np.kron(scales.astype(np.float64), np.ones((32, 32)))[:48]
    want = x.astype(np.float64) @ (w.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * whole).T
    assert relative(y, want) <= ORDER_BOUND


def test_products_of_codes_on_both_sides(stages):
    rng = np.random.default_rng(9)
    k, n = 256, 64
    y = stages.get((16, n), np.float32)
    a, b = codes(rng, 16, k), codes(rng, n, k)
    a[0, :4] = 0x80  # -0, which gfx942's format does not have
    stages.run("tile_fp8", 1, y, a, b, k, n)
    want = np.matmul(*(m.view(ml_dtypes.float8_e4m3fn).astype(np.float64) for m in (a, b.T)))
    np.testing.assert_allclose(y.read(), want, atol=1e-5 * np.abs(want).max())
    y = stages.get((16, n), np.float32)
    a, b = (rng.integers(0, 256, (rows, k // 2)).astype(np.uint8) for rows in (16, n))
    sa, sb = (rng.integers(118, 132, (rows, k // 32)).astype(np.uint8) for rows in (16, n))
    stages.run("tile_fp4", 1, y, a, sa, b, sb, k, n)
    left, right = (fp4_values(m) * np.repeat(ue8m0(s), 32, axis=1) for m, s in ((a, sa), (b, sb)))
    want = left @ right.T
    np.testing.assert_allclose(y.read(), want, atol=1e-5 * np.abs(want).max())


def changed(code, folder, kernel, pattern, replacement):
    """The code object with lines of one kernel changed in its assembly."""
    text = Path(code.path).with_suffix(".s").read_text()
    begin = text.index(f"\n{kernel}:")
    end = text.index(f".size\t{kernel}," if f".size\t{kernel}," in text else ".Lfunc_end", begin)
    body, count = re.subn(pattern, replacement, text[begin:end])
    assert count > 0, f"{kernel} has no {pattern}"
    return amd.assembled(text[:begin] + body + text[end:], code.isa, folder, "changed")


def one_byte_on(found):
    """The load of the byte after it."""
    return f"{found[1]} offset:{int(found[2] or 0) + 1}"


# Factors exchanged: rows of a tile come out as its columns.
EXCHANGED = (r"(v_mfma_f32_16x16x\d+_bf16 \S+), (v\[\S+\]), (v\[\S+\]), ", r"\1, \3, \2, ")


def probed(code):
    """What the kernel that tries a device leaves of 0x1234."""
    machine = amd.machine.Machine(code.isa)
    word = machine.array(np.zeros(1, np.uint32), "word")
    machine.launch(machine.load(code), "lowlat_probe", 1, 256, [word, 0x1234])
    machine.run()
    return int(word.read()[0])


def test_the_probe_of_a_device_tells_another_layout(code, tmp_path):
    step = amd.code("step", code.isa)
    assert probed(step) == 0x1234
    assert probed(changed(step, tmp_path, "lowlat_probe", *EXCHANGED)) == 0x1234 ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    "pattern, replacement",
    [
        EXCHANGED,
        (r"(global_load_ubyte v\d+, .*?)(?: offset:(-?\d+))?$", one_byte_on),
    ],
    ids=["rows-and-columns-exchanged", "scale-of-the-next-run"],
)
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_a_product_with_one_thing_exchanged_is_found(code, tmp_path, kind, pattern, replacement):
    kernel = f"lowlat_stage_linear_{kind}"
    broken = changed(code, tmp_path, kernel, f"(?m){pattern}", replacement)
    assert relative(*product(Stages(broken, seed=2), kind, 6, 512)) > 0.1


# ------------------------------------------------------------------ blocks and ranks


class Ports:
    """Boxes, abort words and status words of a group of ranks."""

    def __init__(self, machine, num_ranks, box_packets):
        self.status = []
        boxes = [
            machine.array(np.zeros((2, num_ranks, box_packets, 4), np.uint32), f"boxes of {rank}")
            for rank in range(num_ranks)
        ]
        aborts = [machine.array(np.zeros(32, np.uint32), "abort word") for _ in range(num_ranks)]
        box_list = machine.array(np.array([b.address for b in boxes], np.uint64), "boxes")
        abort_list = machine.array(np.array([a.address for a in aborts], np.uint64), "abort words")
        self.fault, self.exchange = [], []
        for rank in range(num_ranks):
            status = machine.array(np.zeros(32, np.uint32), "status words")
            self.status.append(status)
            fault = struct.pack("<QQ", abort_list.address, status.address)
            fault += struct.pack("<iiQQ", rank, num_ranks, BUDGET_NS, 0)
            self.fault.append(fault)
            self.exchange.append(
                struct.pack("<Q", box_list.address) + fault + struct.pack("<q", box_packets)
            )


def exchanged(code, num_ranks, seed, num_words=700, num_epochs=5):
    """Every rank's sums, what they must be, and the ranks' states."""
    machine = amd.machine.Machine(code.isa, ranks=num_ranks, seed=seed)
    rng = np.random.default_rng(3)
    parts = rng.standard_normal((num_ranks, num_epochs, num_words)).astype(np.float32)
    ports = Ports(machine, num_ranks, -(-num_words // 3))
    outs = []
    for rank in range(num_ranks):
        out = machine.poisoned((num_epochs, num_words), np.uint16, "sums")
        given = [out, machine.array(parts[rank], "partials"), ports.exchange[rank]]
        loaded = machine.load(code, rank)
        machine.launch(
            loaded, "lowlat_stage_exchange", 1, 256, [*given, 1000, num_epochs, num_words]
        )
        outs.append(out)
    machine.run(limit=20_000_000)
    RAN.add((code.isa, "lowlat_stage_exchange"))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    want = total.astype(ml_dtypes.bfloat16).view(np.uint16)
    return [out.read() for out in outs], want, [int(one.read()[0]) for one in ports.status]


@pytest.mark.parametrize("num_ranks, seed", [(1, 1), (2, 1), (2, 2), (2, 3), (3, 1)])
def test_ranks_exchange_their_sums(code, num_ranks, seed):
    sums, want, states = exchanged(code, num_ranks, seed)
    assert states == [0] * num_ranks
    for out in sums:
        assert np.array_equal(out, want)


STORE = r"global_store_dwordx4 (v\[?\d+(?::\d+)?\]?), v\[(\d+):(\d+)\], (\S+|off)(.*) sc0 sc1"


@pytest.mark.parametrize(
    "pattern, replacement",
    [
        (STORE, r"global_store_dwordx4 \1, v[\2:\3], \4\5 sc0"),
        (r"(global_load_dwordx4 .*) sc0 sc1", r"\1 sc0"),
        # Three words of four: the packet without its tag.
        (
            r"global_store_dwordx4 (.*), v\[(\d+):\d+\], (.*)",
            lambda m: f"global_store_dwordx3 {m[1]}, v[{m[2]}:{int(m[2]) + 2}], {m[3]}",
        ),
    ],
    ids=["store-without-sc1", "load-without-sc1", "dropped-tag"],
)
def test_an_exchange_with_one_thing_dropped_is_found(code, tmp_path, pattern, replacement):
    broken = changed(code, tmp_path, "lowlat_stage_exchange", pattern, replacement)
    sums, want, states = exchanged(broken, 2, 1)
    # A wait runs out of its time on one rank at least, and no rank goes on with wrong sums.
    assert 1 in states and 0 not in states
    assert not all(np.array_equal(out, want) for out in sums)


def handed_over(code, seed, num_blocks=3, num=6):
    machine = amd.machine.Machine(code.isa, seed=seed)
    ports = Ports(machine, 1, 1)
    out = machine.array(np.zeros((num_blocks, num), np.uint32), "out")
    words = machine.array(np.zeros(num_blocks, np.uint32), "words")
    arrived = machine.array(np.zeros(num_blocks, np.uint32), "arrived")
    given = [out, words, arrived, num_blocks, ports.fault[0], num]
    machine.launch(machine.load(code), "lowlat_stage_hand_off", num_blocks, 256, given)
    machine.run(limit=20_000_000)
    RAN.add((code.isa, "lowlat_stage_hand_off"))
    want = np.tile(num_blocks * np.arange(1, num + 1), (num_blocks, 1))
    return np.array_equal(out.read(), want), int(ports.status[0].read()[0])


def test_blocks_hand_over(code):
    for seed in range(4):
        assert handed_over(code, seed) == (True, 0)


@pytest.mark.parametrize(
    "pattern",
    [r"buffer_wbl2 sc1", r"buffer_inv sc1", r"(global_store_dword .*) sc1"],
    ids=["no-write-back", "no-invalidate", "arrival-of-the-wave"],
)
def test_a_hand_over_with_one_thing_dropped_is_found(code, tmp_path, pattern):
    keeps = r"\1" if "(" in pattern else ""
    broken = changed(code, tmp_path, "lowlat_stage_hand_off", pattern, keeps)
    assert any(handed_over(broken, seed) != (True, 0) for seed in range(6))


def test_every_kernel_of_a_stage_ran(code, stages, request):
    chosen = request.config.option.keyword or any("::" in word for word in request.config.args)
    if chosen:
        pytest.skip("it looks back on the tests of all stages, and only chosen ones run here")
    assert set(code.kernels) - {kernel for isa, kernel in RAN if isa == code.isa} == set()


def test_every_instruction_of_the_stages_is_modelled(code):
    assert amd.machine.undecodable(code) == []
