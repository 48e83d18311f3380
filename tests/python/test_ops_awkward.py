"""Inputs that random ones never meet: ``reference`` by the oracle, the others by their bounds."""

import numpy as np
import pytest
from oracle import MODELS, OPS
from oracle.cases import make, one
from oracle.compare import check_declared, check_oracle_outputs
from oracle.formats import bf16_bits, bf16_value, e4m3_value
from oracle.run import COMPUTED, PLATFORMS, bounds, run

SCALE_BLOCK = {"v4": 128, "v41": 32}
# Experts a token of the target, and of the draft.
GATES = [("v4", 6), ("v41", 3), ("v41", 6)]


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


def agree(op, model, arrays):
    """Every platform against the oracle; gives the oracle's outputs for the case's own checks."""
    want = OPS[model][op](arrays)
    check_oracle_outputs(op, run(op, "reference", arrays, model), want)
    for platform in COMPUTED:
        got = run(op, platform, arrays, model)
        check_declared(op, arrays, got, want, bounds(op, platform, model), model)
    return want


def agree_exactly(op, model, arrays):
    """As agree(), and all are equal: no score is close to another but exact ties."""
    want = agree(op, model, arrays)
    for platform in COMPUTED:
        for name, got in run(op, platform, arrays, model).items():
            assert np.array_equal(got, want[name]), f"{op}: {name} is {got}, oracle {want[name]}"
    return want


# ------------------------------------------------------------------ hyper-connections and norms


@pytest.mark.parametrize("op", ["rms_norm", "hc_combine_norm", "hc_post"])
def test_signed_zeros_and_subnormals(model, op):
    arrays = make(op, 1, model, T=3, H=64)
    name = "x" if op == "rms_norm" else "residual"
    arrays[name][0] = 0x8000  # -0
    arrays[name][1] = 0x0001  # the smallest subnormal
    arrays[name][2, ..., ::2] = 0x8003
    agree(op, model, arrays)


def test_a_zero_row_norms_to_zero(model):
    # The mean is 0 and eps is 1e-20 (V4: 1e-6): 1e10 (1e3) times 0.
    arrays = make("rms_norm", 1, model, T=1, H=32)
    arrays["x"][:] = 0
    assert not (agree("rms_norm", model, arrays)["y"] & 0x7FFF).any()


def test_equal_streams_keep_their_value(model):
    """Of four equal streams, a `pre` that sums to one leaves the stream."""
    arrays = make("hc_combine_norm", 2, model, T=2, H=32)
    arrays["residual"][:] = arrays["residual"][:, :1]
    arrays["pre"][:] = 0.25
    want = agree("hc_combine_norm", model, arrays)["x"]
    plain = OPS[model]["rms_norm"]({"x": arrays["residual"][:, 0], "gain": arrays["gain"]})["y"]
    assert np.array_equal(want, plain)
    stats = make("hc_stats", 2, model, T=2, H=32)
    agree("hc_stats", model, stats | {"residual": arrays["residual"]})


def test_hc_stats_of_a_zero_residual(model):
    arrays = make("hc_stats", 3, model, T=2, H=32)
    arrays["residual"][0] = 0
    arrays["residual"][1] = 0x0001
    agree("hc_stats", model, arrays)


@pytest.mark.parametrize("spread", [30.0, 80.0, 200.0])
def test_sinkhorn_near_singular(model, spread):
    """One column takes nearly all of every row; exp underflows; eps alone keeps the rest."""
    arrays = make("hc_stats", 4, model, T=1, H=32)
    arrays["fn"][:] = 0
    logits = np.zeros((4, 4), np.float32)
    logits[:, 0] = spread
    logits[3] = -spread
    arrays["base"][8:] = logits.reshape(-1)
    want = agree("hc_stats", model, arrays)["comb"][0].astype(np.float64)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(want.sum(0), 1.0, atol=1e-4)


def test_sinkhorn_of_a_permutation(model):
    arrays = make("hc_stats", 5, model, T=1, H=32)
    arrays["fn"][:] = 0
    arrays["base"][8:] = (np.eye(4)[[2, 0, 3, 1]] * 60).reshape(-1)
    want = agree("hc_stats", model, arrays)["comb"][0]
    np.testing.assert_allclose(want, np.eye(4)[[2, 0, 3, 1]], atol=1e-5)


def test_rank_sum_adds_in_rank_order(model):
    """In fp32 (2^24 + 1) + 1 is 2^24 while 1 + 1 + 2^24 is not: the order shows."""
    big = 2.0**24
    partial = np.zeros((4, 2, 32), np.float32)
    partial[:, 0, 0] = [big, 1.0, -big, 1.0]
    partial[:, 1, 0] = [big, -big, 1.0, 1.0]
    for platform in PLATFORMS:
        y = bf16_value(run("rank_sum", platform, {"partial": partial}, model)["y"])
        assert y[0, 0] == 1.0 and y[1, 0] == 2.0, platform


def test_head_norm_takes_each_head_by_itself():
    arrays = make("head_norm", 1, "v4", T=3, h=3)
    arrays["x"][0, 0] = 0x8000
    arrays["x"][0, 1] = 0x0001
    arrays["x"][1, 0] = bf16_bits(bf16_value(arrays["x"][1, 0]) * 2.0**30)
    arrays["x"][1, 1] = bf16_bits(bf16_value(arrays["x"][1, 1]) * 2.0**-30)  # eps is all there is
    arrays["x"][2, 2, 1:] = 0
    want = bf16_value(agree("head_norm", "v4", arrays)["x"])
    assert not want[0, 0].any()
    # One of 512 elements holds everything: sqrt(512) is its share.
    np.testing.assert_allclose(np.abs(want[2, 2, 0]), 512.0**0.5, rtol=1e-2)
    np.testing.assert_allclose((want[1, 0] ** 2).mean(), 1.0, rtol=1e-2)


def test_v4_takes_the_statistic_before_rounding():
    """A row that bf16 moves by nearly half a step shows the rule."""
    arrays = make("hc_combine_norm", 3, "v4", T=1, H=32)
    # Streams of 1 and weights that sum to 1 + 2^-8 - 2^-12: bf16 makes 1 of it, a third of a step
    # below. The norm of a constant row is then 1 by the rounded rule, and 1 - 2^-8 (a step of bf16
    # below 1) by the exact one.
    arrays["residual"][:] = bf16_bits(1.0)
    arrays["pre"][:] = [1.0, 2.0**-8 - 2.0**-12, 0.0, 0.0]
    arrays["gain"][:] = bf16_bits(1.0)
    assert (bf16_value(agree("hc_combine_norm", "v4", arrays)["x"]) == 1.0 - 2.0**-8).all()
    assert (bf16_value(agree("hc_combine_norm", "v41", arrays)["x"]) == 1.0).all()


def test_norms_of_rows_below_the_root_of_eps():
    """eps is 1e-6 in V4 and 1e-20 in V4.1: a row at 2^-20 keeps its size in one of them only."""
    arrays = make("rms_norm", 4, "v4", T=2, H=64)
    arrays["x"] = bf16_bits(bf16_value(arrays["x"]) * 2.0**-20)
    arrays["gain"][:] = bf16_bits(1.0)
    assert np.abs(bf16_value(agree("rms_norm", "v4", arrays)["y"])).max() < 1e-2
    assert np.abs(bf16_value(agree("rms_norm", "v41", arrays)["y"])).max() > 1.0


def test_hc_head_of_equal_streams_zero_rows_and_shut_gates():
    arrays = make("hc_head", 1, "v4", T=4, H=32)
    arrays["residual"][0] = arrays["residual"][0, :1]
    arrays["residual"][1] = 0x8000
    arrays["residual"][2] = 0x0001
    assert not (agree("hc_head", "v4", arrays)["h"][1] & 0x7FFF).any()
    # Shut gates leave hc_eps of each stream; one open gate leaves its stream.
    arrays["fn"][:] = 0
    arrays["base"][:] = [-200.0, 200.0, -200.0, -200.0]
    arrays["residual"][:, [0, 2, 3]] = bf16_bits(bf16_value(arrays["residual"][:, [0, 2, 3]]) / 512)
    want = bf16_value(agree("hc_head", "v4", arrays)["h"])
    np.testing.assert_allclose(want[3], bf16_value(arrays["residual"][3, 1]), rtol=1e-2, atol=1e-6)
    arrays["base"][:] = -200.0
    agree("hc_head", "v4", arrays)


# ------------------------------------------------------------------ linears


def test_lm_head_of_zero_tiny_and_huge_rows(model):
    arrays = make("lm_head", 3, model, T=4, V=77, H=160)
    arrays["x"][0] = 0x8000  # -0
    arrays["x"][1] = 0x0001  # the smallest subnormal: products leave fp32's, and bf16's, range
    arrays["x"][2] = bf16_bits(bf16_value(arrays["x"][2]) * 2.0**40)
    arrays["w"][5] = 0x8000
    arrays["w"][9] = arrays["w"][8]
    want = bf16_value(agree("lm_head", model, arrays)["logits"])
    assert not want[0].any() and not want[:, 5].any()
    assert np.array_equal(want[:, 8], want[:, 9])


@pytest.mark.parametrize("b", [32, 128])
def test_block_linear_zero_tiny_and_huge_rows(model, b):
    arrays = make("block_linear", 1, model, T=6, N=b, K=2 * b, b=b)
    arrays["x"][0] = 0x8000
    arrays["x"][1] = 0x0001  # below the floor of amax: codes 0
    arrays["x"][2, 1:] = 0  # one outlier a row
    arrays["x"][2, 0] = bf16_bits(np.float64(3e4))
    arrays["x"][3, :b] = bf16_bits(np.float64(448.0))  # amax / 448 exactly a power of two
    arrays["x"][4, :b] = bf16_bits(np.float64(450.0))
    arrays["w"][0] = 0x7E  # 448
    arrays["w"][1] = 0xFE
    arrays["w"][2] = 0x01  # subnormal
    y = bf16_value(agree("block_linear", model, arrays)["y"])
    assert not y[0].any()


def test_block_linear_quantises_by_group(model):
    """A group's outlier must not cost another group its precision."""
    b = SCALE_BLOCK[model]
    arrays = make("block_linear", 2, model, T=1, N=b, K=2 * b, b=b)
    arrays["w"][:] = 0x38  # 1.0
    arrays["w_scale"][:] = 1.0
    x = np.zeros((1, 2 * b))
    x[0, 0], x[0, b] = 4096.0, 2.0**-10
    arrays["x"] = bf16_bits(x)
    y = bf16_value(agree("block_linear", model, arrays)["y"])
    assert (y == bf16_value(bf16_bits(4096.0))).all()
    x[0, 0] = 0.0
    arrays["x"] = bf16_bits(x)
    assert (bf16_value(agree("block_linear", model, arrays)["y"]) == 2.0**-10).all()


# ------------------------------------------------------------------ rotation and KV rows


@pytest.mark.parametrize("yarn", [0, 1])
@pytest.mark.parametrize("inverse", [0, 1])
def test_rope_at_the_ends_of_the_positions(model, yarn, inverse):
    arrays = make("rope", 3, model, T=6, h=2, D=512, yarn=yarn, inverse=inverse)
    arrays["pos"][:] = [0, 1, 65535, 65536, 1048574, 1048575]
    want = agree("rope", model, arrays)["x"]
    assert np.array_equal(want[0], arrays["x"][0]), "position 0 changes nothing"
    assert np.array_equal(want[..., :448], arrays["x"][..., :448]), "only the last 64 rotate"


def test_kv_pack_every_magnitude(model):
    """Groups from the floor to the largest finite fp32, subnormals and signed zeros."""
    kv = np.zeros((40, 512), np.float32)
    rng = np.random.default_rng(1)
    with np.errstate(over="ignore", under="ignore"):
        for row in range(36):
            kv[row] = rng.standard_normal(512) * 2.0 ** (row * 3 - 60)
    kv[36] = 1e-4
    kv[37] = -0.0
    kv[38] = np.float32(1e-42)
    kv[39, ::64] = np.float32(1e-4) * np.float32(448.0)
    agree("kv_pack", model, {"kv": kv})


def test_kv_pack_ties_go_to_the_even_code(model):
    kv = np.zeros((1, 512), np.float32)
    kv[0, 0] = 448.0  # the scale is 1
    kv[0, 1:5] = [1.0625, 1.1875, -1.0625, 2.0**-10]  # ties of 1 | 1.125 | 1.25; half a subnormal
    kv[0, 5:7] = [3 * 2.0**-10, 432.0]
    kv[0, 448:451] = [1.00390625, 1.01171875, -1.00390625]  # bf16 ties
    want = agree("kv_pack", model, {"kv": kv})["rows"][0]
    values = e4m3_value(want[:8])
    assert values[1:7].tolist() == [1.0, 1.25, -1.0, 0.0, 2 * 2.0**-9, 448.0]
    tail = bf16_value(want[448:454].copy().view("<u2"))
    assert tail.tolist() == [1.0, 1.015625, -1.0]


def test_kv_rows_survive_a_second_packing(model):
    rows = make("kv_unpack", 6, model, T=8)["rows"]
    for platform in PLATFORMS:
        kv = run("kv_unpack", platform, {"rows": rows}, model)["kv"]
        packed = run("kv_pack", platform, {"kv": kv}, model)
        again = run("kv_unpack", platform, packed, model)["kv"]
        # A group whose codes all rounded down may take the next smaller scale; values stay.
        assert np.array_equal(again, kv)


def test_kv_unpack_every_code(model):
    rows = np.zeros((2, 584), np.uint8)
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    rows[0, : len(codes)] = codes
    rows[0, 576:583] = [127, 120, 105, 130, 1, 127, 127]
    rows[1, 448:576] = np.arange(64, dtype="<u2").view(np.uint8)  # bf16 subnormals
    rows[1, 576:583] = 127
    agree("kv_unpack", model, {"rows": rows})


# ------------------------------------------------------------------ attention and compressor


def attention(**changes):
    return make("sparse_attention", 9, T=4, h=2, S=140, s=128, E=30, n=20) | changes


def test_attention_with_all_keys_padded_gives_zero(model):
    arrays = attention()
    arrays["swa_idx"][1] = -1
    arrays["extra_idx"][1] = -1
    for sink in (0.5, -np.inf):
        arrays["sink"] = np.array([sink, sink], np.float32)
        want = agree("sparse_attention", model, arrays)["o"]
        assert not want[1].any() and want[0].any()


def test_attention_sink_that_dominates(model):
    arrays = attention(sink=np.array([1e4, 80.0], np.float32))
    want = bf16_value(agree("sparse_attention", model, arrays)["o"])
    assert not want[:, 0].any(), "exp(s - 1e4) is nothing"


def test_attention_without_a_sink_averages(model):
    """One key and no sink: the output is the key, whatever the query."""
    arrays = attention(sink=np.full(2, -np.inf, np.float32))
    arrays["swa_idx"][:] = -1
    arrays["extra_idx"][:] = -1
    arrays["swa_idx"][:, 77] = [3, 5, 139, 0]
    want = bf16_value(agree("sparse_attention", model, arrays)["o"])
    keys = OPS[model]["kv_unpack"]({"rows": arrays["swa"]})["kv"].astype(np.float64)
    for t, j in enumerate([3, 5, 139, 0]):
        assert np.array_equal(want[t, 0], bf16_value(bf16_bits(keys[j])))


def test_attention_counts_the_sink_once_and_unscaled(model):
    """Zero query: every score is 0, so each key weighs 1 and the sink exp(sink)."""
    arrays = attention()
    arrays["q"][:] = 0
    arrays["sink"] = np.array([0.0, np.log(256.0)], np.float32)
    arrays["swa_idx"][:] = -1
    arrays["extra_idx"][:] = -1
    arrays["swa_idx"][:, :3] = [0, 1, 2]
    want = bf16_value(agree("sparse_attention", model, arrays)["o"])
    keys = OPS[model]["kv_unpack"]({"rows": arrays["swa"][:3]})["kv"].astype(np.float64)
    np.testing.assert_allclose(want[0, 0], keys.sum(0) / 4, atol=1e-2)
    np.testing.assert_allclose(want[0, 1], keys.sum(0) / 259, atol=1e-3)


def test_attention_scores_far_apart(model):
    """Scores in the thousands: a softmax without a shift would overflow."""
    arrays = attention()
    arrays["q"] = bf16_bits(bf16_value(arrays["q"]) * 500)
    agree("sparse_attention", model, arrays)


def test_attention_of_signed_zeros_subnormals_and_saturated_keys(model):
    arrays = make("sparse_attention", 9, model, T=4, h=2, S=140, s=128, E=60, n=40)
    arrays["q"][0] = 0x8000  # every score is 0: an average
    arrays["q"][1] = 0x0001
    arrays["swa"][:70, :448] = 0x7E  # 448, the largest code
    arrays["swa"][70:, :448] = 0xFE
    arrays["extra"][::2, :448] = 0x80  # -0
    agree("sparse_attention", model, arrays)


def test_attention_with_no_extra_keys(model):
    for num_entries in (0, 7):
        shape = dict(T=2, h=1, S=130, s=128, E=num_entries, n=0)
        agree("sparse_attention", model, make("sparse_attention", 2, model, **shape))


def test_attention_takes_a_key_twice_when_it_is_listed_twice(model):
    """Window and compressed set overlap; nothing is deduplicated."""
    arrays = attention(sink=np.zeros(2, np.float32))
    arrays["q"][:] = 0
    arrays["swa_idx"][:] = -1
    arrays["extra_idx"][:] = -1
    arrays["swa_idx"][:, :2] = 1
    want = bf16_value(agree("sparse_attention", model, arrays)["o"])
    key = OPS[model]["kv_unpack"]({"rows": arrays["swa"][1:2]})["kv"][0].astype(np.float64)
    assert np.array_equal(want[0, 0], bf16_value(bf16_bits(key * 2 / 3)))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_compress_drops_a_pair_that_is_not_whole(length):
    arrays = make("compress", 3, L=length, H=32, ratio=2)
    assert agree("compress", "v41", arrays)["kv"].shape == (length // 2, 512)


def test_compress_with_equal_and_far_apart_scores():
    arrays = make("compress", 4, L=6, H=32, ratio=2)
    arrays["x"][1] = arrays["x"][0]  # equal scores: the mean
    arrays["x"][2:4] = bf16_bits(bf16_value(arrays["x"][2:4]) * 300)  # one takes all
    agree("compress", "v41", arrays)


@pytest.mark.parametrize("ratio", [1, 2])
def test_compress_of_zero_tiny_and_huge_rows(ratio):
    arrays = make("compress", 5, L=8, H=32, ratio=ratio)
    arrays["x"][0:2] = 0
    arrays["x"][2:4] = bf16_bits(bf16_value(arrays["x"][2:4]) * 2.0**-60)
    arrays["x"][4:6] = bf16_bits(bf16_value(arrays["x"][4:6]) * 2.0**40)
    want = agree("compress", "v41", arrays)["kv"]
    assert not want[0].any()


def test_compress_saturates_its_fp4_scale():
    """Norm gains of 2^12 put amax / 6 past e4m3's 448; gains of 2^-14 below its 2^-9."""
    arrays = make("compress", 6, L=4, H=32, ratio=1)
    gain = bf16_value(arrays["norm"])
    gain[:128] *= 2.0**12
    gain[128:256] *= 2.0**-14
    arrays["norm"] = bf16_bits(gain)
    want = np.abs(agree("compress", "v41", arrays)["kv"])
    assert want[:, :128].max() == 448 * 6
    assert set(np.unique(want[:, 128:256])) <= {k * 2.0**-9 for k in (0, 0.5, 1, 1.5, 2, 3, 4, 6)}


def compress_v4(seed, length, ratio, **changes):
    return make("compress", seed, "v4", L=length, H=32, ratio=ratio) | changes


@pytest.mark.parametrize("ratio, length", [(4, 3), (4, 4), (4, 7), (128, 127), (128, 129)])
def test_v4_compress_drops_a_block_that_is_not_whole(ratio, length):
    want = agree("compress", "v4", compress_v4(1, length, ratio))["kv"]
    assert want.shape == (length // ratio, 512)


def test_v4_first_block_has_no_overlap():
    """What projects the overlap cannot change entry 0, and does change the others."""
    arrays = compress_v4(2, 12, 4)
    want = agree("compress", "v4", arrays)["kv"]
    changed = {name: arrays[name].copy() for name in ("wkv", "wgate", "ape")}
    changed["wkv"][:512] = 0x3F80
    changed["wgate"][:512] ^= 0x8000
    changed["ape"][:, :512] = 50.0
    other = agree("compress", "v4", arrays | changed)["kv"]
    assert np.array_equal(other[0], want[0])
    assert (other[1:] != want[1:]).any(axis=1).all()


def test_v4_blocks_overlap_by_one():
    """Token 5 is in block 1 and overlaps block 2."""
    arrays = compress_v4(3, 16, 4)
    want = agree("compress", "v4", arrays)["kv"]
    arrays["x"] = arrays["x"].copy()
    arrays["x"][5] ^= 0x8000
    other = agree("compress", "v4", arrays)["kv"]
    assert (other != want).any(axis=1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("ratio", [4, 128])
def test_v4_position_bias_picks_the_token(ratio):
    """With no gate the bias alone weighs: own token 2, then (ratio 4) overlapping token 1."""
    arrays = compress_v4(4, 2 * ratio, ratio)
    arrays["wgate"][:] = 0
    arrays["ape"][:] = 0
    half = 512 if ratio == 4 else 0
    arrays["ape"][2, half:] = 90.0
    x, wkv = bf16_value(arrays["x"]), bf16_value(arrays["wkv"])

    def alone(token, rows):
        """The entry that one token alone would make, before its norm: its direction."""
        c = (x[token] @ wkv[rows].T)[:448]
        return c / np.linalg.norm(c)

    def direction(entry, arrays):
        gain = bf16_value(arrays["norm"])[:448]
        values = entry[:448].astype(np.float64) / gain
        return values / np.linalg.norm(values)

    want = agree("compress", "v4", arrays)["kv"]
    own = slice(half, half + 512)
    for n in range(2):
        np.testing.assert_allclose(direction(want[n], arrays), alone(n * ratio + 2, own), atol=3e-3)
    if ratio == 4:
        arrays["ape"][1, :512] = 180.0
        want = agree("compress", "v4", arrays)["kv"]
        np.testing.assert_allclose(direction(want[0], arrays), alone(2, own), atol=3e-3)
        np.testing.assert_allclose(direction(want[1], arrays), alone(1, slice(0, 512)), atol=3e-3)


@pytest.mark.parametrize("ratio", [4, 128])
def test_v4_compress_of_equal_zero_tiny_and_huge_rows(ratio):
    arrays = compress_v4(5, 5 * ratio, ratio)
    x = bf16_value(arrays["x"])
    x[:ratio] = 0.0
    x[ratio : 2 * ratio] = x[ratio]  # every candidate of its half scores alike but for the bias
    x[2 * ratio : 3 * ratio] *= 2.0**-60
    x[3 * ratio : 4 * ratio] *= 2.0**40  # scores in the 2^40: one candidate takes all
    arrays["x"] = bf16_bits(x)
    want = agree("compress", "v4", arrays)["kv"]
    assert not want[0].any() and np.isfinite(want).all()


@pytest.mark.parametrize("bias", [-3e38, 3e38])
def test_v4_compress_with_biases_near_the_largest_float(bias):
    """A bias near -FLT_MAX still outranks the missing overlap of block 0, or leaves its place."""
    arrays = compress_v4(6, 8, 4)
    arrays["ape"][:2] = bias
    assert np.isfinite(agree("compress", "v4", arrays)["kv"]).all()


# ------------------------------------------------------------------ index


def spread(q):
    """index_query of one head at position 0: codes as values, and their scale."""
    arrays = {"q": bf16_bits(np.asarray(q, np.float64).reshape(1, 1, 128)), "pos": np.zeros(1, int)}
    out = agree("index_query", "v4", arrays)
    return e4m3_value(out["iq"][0, 0]), float(out["qs"][0, 0])


def test_v4_index_query_transforms_and_scales():
    # One channel spreads evenly with the signs of its row of the matrix.
    for channel in (0, 1, 77):
        q = np.zeros(128)
        q[channel] = 2.0
        codes, scale = spread(q)
        sign = [(-1.0) ** bin(channel & j).count("1") for j in range(128)]
        assert np.array_equal(codes, 448.0 * np.array(sign))
        np.testing.assert_allclose(scale, 2.0 * 128**-0.5 / 448, rtol=1e-7)
    # A constant gathers in channel 0.
    codes, scale = spread(np.full(128, -1.0))
    assert codes[0] == -448.0 and not codes[1:].any()
    np.testing.assert_allclose(scale, 128**0.5 / 448, rtol=1e-7)


def test_v4_index_query_of_zero_and_tiny_heads():
    floor = np.float64(np.float32(np.float32(1e-4) / np.float32(448)))
    for q in (np.zeros(128), np.full(128, -0.0), np.full(128, 1e-42)):
        codes, scale = spread(q)
        assert not codes.any()
        np.testing.assert_allclose(scale, floor, rtol=2e-7)
    # Half of the floor's amax: codes reach 224.
    q = np.zeros(128)
    q[0] = 5e-5 * 128**0.5
    codes, scale = spread(q)
    assert set(np.abs(codes)) == {224.0}
    np.testing.assert_allclose(scale, floor, rtol=2e-7)


@pytest.mark.parametrize("pos", [0, 1, 65535, 65536, 1048575])
@pytest.mark.parametrize(
    "model, op, shape",
    [
        ("v4", "index_query", dict(T=6, h=3)),
        ("v41", "index_query", dict(T=6, h=3)),
        ("v41", "index_key", dict(T=6)),
    ],
)
def test_index_queries_and_keys_at_the_ends_of_the_positions(model, op, shape, pos):
    """V4's keys are of a sequence from position 0."""
    arrays = make(op, 4, model, **shape)
    arrays["pos"][:] = pos
    agree(op, model, arrays)


def test_v4_index_key_of_zero_tiny_and_huge_rows():
    arrays = make("index_key", 1, "v4", L=24, H=32)
    x = bf16_value(arrays["x"])
    x[:4] = 0.0
    x[8:12] *= 2.0**-60
    x[16:20] *= 2.0**40
    arrays["x"] = bf16_bits(x)
    rows = agree("index_key", "v4", arrays)["rows"]
    scale = np.ascontiguousarray(rows[:, 128:]).view("<f4")[:, 0]
    assert not (rows[0, :128] & 0x7F).any()
    np.testing.assert_allclose(scale[0], 1e-4 / 448, rtol=2e-7)


def test_v4_index_select_of_every_code():
    """Signed zeros, subnormals and the largest codes; a scale of zero silences a key."""
    arrays = make("index_select", 5, "v4", T=2, h=2, N=24, k=6)
    codes = np.array([0x00, 0x80, 0x01, 0x81, 0x07, 0x7E, 0xFE, 0x38], np.uint8)
    arrays["iq"][0] = np.resize(codes, (2, 128))
    arrays["ik"][:8, :128] = codes[:, None]
    arrays["ik"][8:12, 128:] = 0
    arrays["weights"][:] = 1.0
    arrays["count"][:] = 24
    agree("index_select", "v4", arrays)


def test_index_query_fp4_ties_and_zero_groups():
    arrays = make("index_query", 1, T=1, h=1)
    arrays["pos"][:] = 0
    q = np.zeros((1, 1, 128))
    q[0, 0, :9] = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25]
    q[0, 0, 32:35] = [2.0**-120, -(2.0**-121), 2.0**-130]
    arrays["q"] = bf16_bits(q)
    want = bf16_value(agree("index_query", "v41", arrays)["iq"])[0, 0]
    assert want[:9].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0]
    assert not want[64:].any()


def test_index_select_ties_go_to_the_lowest_position(model):
    arrays = make("index_select", 1, model, T=2, h=1, N=40, k=8)
    arrays["ik"][:] = arrays["ik"][0]  # every score is equal
    arrays["count"][:] = [40, 5]
    arrays["weights"][:] = 1.0
    want = agree_exactly("index_select", model, arrays)["idx"]
    assert want[0].tolist() == list(range(8))
    assert want[1].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_index_select_with_nothing_to_select(model):
    arrays = make("index_select", 2, model, T=2, h=2, N=20, k=4)
    arrays["count"][:] = [0, 4]
    want = agree_exactly("index_select", model, arrays)["idx"]
    assert want.tolist() == [[-1] * 4, [0, 1, 2, 3]]


def test_index_select_with_negative_weights_prefers_the_silent_keys(model):
    arrays = make("index_select", 3, model, T=1, h=1, N=30, k=5)
    arrays["weights"][:] = -1.0
    agree("index_select", model, arrays)


# ------------------------------------------------------------------ routing and experts


def test_gate_ties_go_to_the_lowest_id(model):
    arrays = make("gate", 1, model, T=2, H=32, E=12)
    arrays["w"][:] = arrays["w"][0]
    arrays["bias"][:] = 0.0
    arrays["bias"][7] = 1.0
    out = agree("gate", model, arrays)
    for platform in PLATFORMS:
        assert np.array_equal(run("gate", platform, arrays, model)["ids"], out["ids"]), platform
    assert out["ids"][0].tolist() == [7, 0, 1, 2, 3, 4]
    np.testing.assert_allclose(out["weight"], 0.25, rtol=1e-6)


@pytest.mark.parametrize("model, k", GATES)
def test_gate_bias_ranks_but_does_not_weigh(model, k):
    arrays = make("gate", 2, model, T=3, H=32, E=10, k=k)
    biased = dict(arrays, bias=np.where(np.arange(10) < k, 50.0, 0.0).astype(np.float32))
    out = agree("gate", model, biased)
    assert set(out["ids"][0].tolist()) == set(range(k))
    np.testing.assert_allclose(out["weight"].sum(1), 1.5, rtol=1e-6)


@pytest.mark.parametrize("model, k", GATES)
def test_gate_logits_of_every_size(model, k):
    """Beyond 20 softplus is the identity; far below zero scores vanish, and so may their sum."""
    arrays = make("gate", 3, model, T=6, H=32, E=8, k=k)
    x = np.zeros((6, 32))
    x[:, 0] = [19.9, 20.1, 200.0, -30.0, -90.0, -3000.0]
    arrays["x"] = bf16_bits(x)
    w = np.zeros((8, 32))
    w[:, 0] = np.linspace(0.9, 1.1, 8)
    arrays["w"] = bf16_bits(w)
    arrays["bias"] = np.linspace(0, 1e-3, 8).astype(np.float32)
    assert np.isfinite(agree("gate", model, arrays)["weight"]).all()


def test_hash_gate_keeps_the_tables_order():
    arrays = make("hash_gate", 1, "v4", T=4, V=5, H=32, E=12)
    arrays["token"][:] = [0, 4, 4, 0]
    arrays["table"][4] = [11, 0, 7, 3, 2, 10]
    arrays["table"][0] = 5  # six times: each counts
    out = agree("hash_gate", "v4", arrays)
    assert np.array_equal(out["ids"], arrays["table"][arrays["token"]])
    np.testing.assert_allclose(out["weight"].sum(1), 1.5, rtol=1e-6)


def test_hash_gate_of_equal_and_vanishing_scores():
    """Equal logits weigh alike; a sum of zero stays zero (1e-20 is added, nothing divides by 1)."""
    arrays = make("hash_gate", 2, "v4", T=3, V=5, H=32, E=8)
    x = np.zeros((3, 32))
    x[:, 0] = [0.0, 30.0, -3000.0]
    arrays["x"], arrays["w"][:] = bf16_bits(x), bf16_bits(1.0)
    out = agree("hash_gate", "v4", arrays)["weight"]
    np.testing.assert_allclose(out[:2], 0.25, rtol=1e-6)
    assert not out[2].any()


def expert_case(seed, model, **shape):
    b = SCALE_BLOCK[model]
    return make("experts", seed, model, H=2 * b, I=b, b=b, **shape)


def test_experts_clamp_gate_from_above_only(model):
    arrays = expert_case(1, model, T=4, E=6)
    arrays["x"] = bf16_bits(bf16_value(arrays["x"]) * 200)
    agree("experts", model, arrays)


def test_experts_at_zero_weight_leave_the_shared_one(model):
    arrays = expert_case(2, model, T=3, E=6)
    arrays["weight"][:] = 0.0
    want = agree("experts", model, arrays)["y"]
    arrays["ids"] = np.roll(arrays["ids"], 1, axis=1)
    assert np.array_equal(agree("experts", model, arrays)["y"], want)


def test_experts_of_zero_rows(model):
    arrays = expert_case(3, model, T=2, E=6)
    arrays["x"][0] = 0x8000
    assert not agree("experts", model, arrays)["y"][0].any()


def test_experts_that_share_a_row_or_stand_idle(model):
    arrays = expert_case(4, model, T=8, E=9)
    arrays["ids"][:] = [8, 0, 3, 5, 1, 2]  # everyone on the same six; 4, 6 and 7 idle
    agree("experts", model, arrays)


# ------------------------------------------------------------------ n-gram memory


def test_engram_hash_blocks_the_start_and_image_tokens():
    image = 9
    rows = [
        # token, history oldest first, pos
        (5, (1, 2, 3), 100),
        (5, (1, 2, 3), 0),  # nothing before the start
        (5, (1, 2, 3), 1),
        (5, (1, 2, 3), 2),
        (5, (1, 2, 3), 3),
        (5, (1, 2, image), 100),  # an image token blocks itself and all before it
        (5, (1, image, 3), 100),
        (5, (image, 2, 3), 100),
        (image, (1, 2, 3), 100),  # the row itself is an image token
        (2, (2, 2, 2), 1048575),  # the pad token as a token
    ]
    arrays = make("engram_hash", 1, T=len(rows), V=10)
    arrays["token"] = np.array([r[0] for r in rows], np.int64)
    arrays["history"] = np.array([r[1] for r in rows], np.int64)
    arrays["pos"] = np.array([r[2] for r in rows], np.int64)
    arrays["image_token"] = one(image)
    ids = agree("engram_hash", "v41", arrays)["ids"]
    same = dict(arrays, token=np.array([5], np.int64), pos=np.array([100], np.int64))
    same["history"] = np.array([[2, 2, 2]], np.int64)
    assert np.array_equal(OPS["v41"]["engram_hash"](same)["ids"][0], ids[1])
    assert np.array_equal(ids[4], ids[0]) and not np.array_equal(ids[3], ids[0])
    assert np.array_equal(ids[5], ids[1]), "blocked by an image token as by the start"
    assert np.array_equal(ids[6], ids[2]) and np.array_equal(ids[7], ids[3])


def test_engram_hash_at_the_largest_products():
    arrays = make("engram_hash", 2, T=4, V=40)
    arrays["map"][:] = 99091
    arrays["mult"][:] = 2 * 46539438283890 + 1  # the largest that the published draw can give
    agree("engram_hash", "v41", arrays)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 64.0])
def test_engram_apply_gates_of_both_signs(scale):
    """At |dot| below 1e-6 the gate is sigmoid(+-1e-3); large ones saturate."""
    arrays = make("engram_apply", 1, T=4, H=32, D=32)
    for name in ("q_weight", "k_weight"):
        arrays[name] = bf16_bits(bf16_value(arrays[name]) * scale)
    agree("engram_apply", "v41", arrays)


def test_engram_apply_of_a_zero_lookup_changes_nothing():
    arrays = make("engram_apply", 2, T=2, H=32, D=32)
    arrays["e"][0] = 0
    arrays["residual"][1, 2] = 0
    want = agree("engram_apply", "v41", arrays)["residual"]
    assert np.array_equal(want[0], arrays["residual"][0])


# ------------------------------------------------------------------ drafting and accepting


def test_markov_draft_greedy_ties_go_to_the_lowest_id(model):
    arrays = make("markov_draft", 1, model, B=2, g=5, V=16, R=4)
    arrays["base"][:] = 0.0
    arrays["base"][:, :, [3, 9]] = 4.0
    arrays["w2"][:] = 0
    arrays["temp"][:] = 0.0
    assert (agree_exactly("markov_draft", model, arrays)["tokens"] == 3).all()


def test_markov_draft_rounds_the_bias_to_bf16(model):
    """1 + 2^-9 rounds to 1, so ids 2 and 5 tie and the lower one wins; unrounded, 5 would."""
    arrays = make("markov_draft", 2, model, B=1, g=1, V=8, R=4)
    arrays["base"][:] = 0.0
    arrays["temp"][:] = 0.0
    arrays["anchor"][:] = 0
    w1, w2 = np.zeros((8, 4)), np.zeros((8, 4))
    w1[0] = [1.0, 2.0**-9, 0, 0]
    w2[2, 0] = 1.0
    w2[5, :2] = 1.0
    arrays["w1"], arrays["w2"] = bf16_bits(w1), bf16_bits(w2)
    want = agree_exactly("markov_draft", model, arrays)
    assert want["tokens"][0, 0] == 2 and want["logits"][0, 0, 5] == 1.0


def test_markov_draft_mixed_temperatures(model):
    arrays = make("markov_draft", 3, model, B=6, g=5, V=32, R=8)
    arrays["temp"][:] = [0.0, 1e-7, 1e-5, 0.7, 5.0, 0.0]
    want = agree("markov_draft", model, arrays)["tokens"]
    # Temperatures below 1e-5 count as 1e-5: the noise cannot move the argmax of such scores.
    greedy = agree("markov_draft", model, arrays | {"temp": np.zeros(6, np.float32)})["tokens"]
    assert np.array_equal(want[:3], greedy[:3]) and np.array_equal(want[5], greedy[5])


def acceptance(**changes):
    return make("accept", 5, B=6, g=5, V=16) | changes


def test_accept_all_and_none_greedy(model):
    arrays = acceptance(temp=np.zeros(6, np.float32))
    best = arrays["target_logits"].argmax(-1)
    arrays["draft"] = best[:, :5].astype(np.int64)
    arrays["draft"][3:, 0] = (best[3:, 0] + 1) % 16
    want = agree("accept", model, arrays)
    assert want["accepted"].tolist() == [5, 5, 5, 0, 0, 0]
    assert np.array_equal(want["next"][:3], best[:3, 5])
    assert np.array_equal(want["next"][3:], best[3:, 0])


def test_accept_all_and_none_at_temperature(model):
    arrays = acceptance(temp=np.full(6, 0.8, np.float32))
    arrays["draft_logits"] = arrays["target_logits"][:, :5].copy()  # p = q: u q < p always
    arrays["draft_logits"][3:, 0] = -60.0
    arrays["target_logits"][3:, 0, :] = 0.0
    arrays["draft_logits"][3:, 0, 7] = 60.0  # q is one-hot at 7, p uniform
    arrays["draft"][3:, 0] = 7
    arrays["coins"][3:, 0] = 0.5  # 0.5 * 1 >= 1/16: rejected
    want = agree("accept", model, arrays)
    assert want["accepted"].tolist() == [5, 5, 5, 0, 0, 0]
    assert (want["next"][3:] != 7).all(), "the residual has nothing at the rejected id"


def test_accept_greedy_ties_go_to_the_lowest_id(model):
    arrays = acceptance(temp=np.zeros(6, np.float32))
    arrays["target_logits"][:] = 0.0
    arrays["target_logits"][:, :, [4, 11]] = 3.0
    arrays["draft"][:] = 4
    arrays["draft"][1] = 11
    want = agree_exactly("accept", model, arrays)
    assert want["accepted"].tolist() == [5, 0, 5, 5, 5, 5] and (want["next"] == 4).all()


def test_accept_coins_at_their_ends(model):
    arrays = acceptance(temp=np.full(6, 1.0, np.float32))
    arrays["coins"][:3] = 0.0
    arrays["coins"][3:] = np.nextafter(np.float32(1), np.float32(0))
    agree("accept", model, arrays)


def test_accept_with_nothing_left_takes_the_last_id(model):
    """p has no weight where the draft went and equals q elsewhere: a residual of zero."""
    arrays = acceptance(temp=np.full(6, 1.0, np.float32))
    row = np.zeros(16, np.float32)
    row[3] = -200.0  # exp(-200) / 15 is 0 in fp32, and far below any coin in float64
    arrays["target_logits"][:, 0] = row
    arrays["draft_logits"][:, 0] = 0.0
    arrays["draft"][:, 0] = 3
    arrays["coins"][:, 0] = 0.5
    want = agree("accept", model, arrays)
    assert (want["accepted"] == 0).all()


def test_accept_mixed_temperatures(model):
    arrays = acceptance(temp=np.array([0.0, 1e-9, 1e-5, 0.5, 1.0, 4.0], np.float32))
    agree("accept", model, arrays)
