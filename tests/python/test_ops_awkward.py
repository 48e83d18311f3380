"""Inputs that random ones never meet: ``reference`` by the oracle, ``scalar`` by its bounds."""

import numpy as np
import pytest
from oracle import OPS
from oracle.cases import make, one
from oracle.compare import check_declared, check_oracle_outputs
from oracle.formats import bf16_bits, bf16_value, e4m3_value
from oracle.run import PLATFORMS, bounds, run


def agree(op, arrays):
    """Both platforms against the oracle; gives the oracle's outputs for the case's own checks."""
    want = OPS[op](arrays)
    check_oracle_outputs(op, run(op, "reference", arrays), want)
    check_declared(op, arrays, run(op, "scalar", arrays), want, bounds(op, "scalar"))
    return want


def agree_exactly(op, arrays):
    """As agree(), with ``scalar`` equal too: no score is close to another but exact ties."""
    want = agree(op, arrays)
    for name, got in run(op, "scalar", arrays).items():
        assert np.array_equal(got, want[name]), f"{op}: {name} is {got}, oracle {want[name]}"
    return want


# ------------------------------------------------------------------ hyper-connections and norms


@pytest.mark.parametrize("op", ["rms_norm", "hc_combine_norm", "hc_post"])
def test_signed_zeros_and_subnormals(op):
    arrays = make(op, 1, T=3, H=64)
    name = "x" if op == "rms_norm" else "residual"
    arrays[name][0] = 0x8000  # -0
    arrays[name][1] = 0x0001  # the smallest subnormal
    arrays[name][2, ..., ::2] = 0x8003
    agree(op, arrays)


def test_a_zero_row_norms_to_zero():
    # The mean is 0 and eps is 1e-20: 1e10 times 0.
    arrays = make("rms_norm", 1, T=1, H=32)
    arrays["x"][:] = 0
    assert not (agree("rms_norm", arrays)["y"] & 0x7FFF).any()


def test_equal_streams_keep_their_value():
    """Of four equal streams, a `pre` that sums to one leaves the stream."""
    arrays = make("hc_combine_norm", 2, T=2, H=32)
    arrays["residual"][:] = arrays["residual"][:, :1]
    arrays["pre"][:] = 0.25
    want = agree("hc_combine_norm", arrays)["x"]
    plain = OPS["rms_norm"]({"x": arrays["residual"][:, 0], "gain": arrays["gain"]})["y"]
    assert np.array_equal(want, plain)
    agree("hc_stats", make("hc_stats", 2, T=2, H=32) | {"residual": arrays["residual"]})


def test_hc_stats_of_a_zero_residual():
    arrays = make("hc_stats", 3, T=2, H=32)
    arrays["residual"][0] = 0
    arrays["residual"][1] = 0x0001
    agree("hc_stats", arrays)


@pytest.mark.parametrize("spread", [30.0, 80.0, 200.0])
def test_sinkhorn_near_singular(spread):
    """One column takes nearly all of every row; exp underflows; eps alone keeps the rest."""
    arrays = make("hc_stats", 4, T=1, H=32)
    arrays["fn"][:] = 0
    logits = np.zeros((4, 4), np.float32)
    logits[:, 0] = spread
    logits[3] = -spread
    arrays["base"][8:] = logits.reshape(-1)
    want = agree("hc_stats", arrays)["comb"][0].astype(np.float64)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(want.sum(0), 1.0, atol=1e-4)


def test_sinkhorn_of_a_permutation():
    arrays = make("hc_stats", 5, T=1, H=32)
    arrays["fn"][:] = 0
    arrays["base"][8:] = (np.eye(4)[[2, 0, 3, 1]] * 60).reshape(-1)
    want = agree("hc_stats", arrays)["comb"][0]
    np.testing.assert_allclose(want, np.eye(4)[[2, 0, 3, 1]], atol=1e-5)


def test_rank_sum_adds_in_rank_order():
    """In fp32 (2^24 + 1) + 1 is 2^24 while 1 + 1 + 2^24 is not: the order shows."""
    big = 2.0**24
    partial = np.zeros((4, 2, 32), np.float32)
    partial[:, 0, 0] = [big, 1.0, -big, 1.0]
    partial[:, 1, 0] = [big, -big, 1.0, 1.0]
    for platform in PLATFORMS:
        y = bf16_value(run("rank_sum", platform, {"partial": partial})["y"])
        assert y[0, 0] == 1.0 and y[1, 0] == 2.0, platform


# ------------------------------------------------------------------ linears


@pytest.mark.parametrize("b", [32, 128])
def test_block_linear_zero_tiny_and_huge_rows(b):
    arrays = make("block_linear", 1, T=6, N=b, K=2 * b, b=b)
    arrays["x"][0] = 0x8000
    arrays["x"][1] = 0x0001  # below the floor of amax: codes 0
    arrays["x"][2, 1:] = 0  # one outlier a row
    arrays["x"][2, 0] = bf16_bits(np.float64(3e4))
    arrays["x"][3, :b] = bf16_bits(np.float64(448.0))  # amax / 448 exactly a power of two
    arrays["x"][4, :b] = bf16_bits(np.float64(450.0))
    arrays["w"][0] = 0x7E  # 448
    arrays["w"][1] = 0xFE
    arrays["w"][2] = 0x01  # subnormal
    y = bf16_value(agree("block_linear", arrays)["y"])
    assert not y[0].any()


def test_block_linear_quantises_by_group():
    """A group's outlier must not cost another group its precision."""
    arrays = make("block_linear", 2, T=1, N=32, K=64)
    arrays["w"][:] = 0x38  # 1.0
    arrays["w_scale"][:] = 1.0
    x = np.zeros((1, 64))
    x[0, 0], x[0, 32] = 4096.0, 2.0**-10
    arrays["x"] = bf16_bits(x)
    y = bf16_value(agree("block_linear", arrays)["y"])
    assert (y == bf16_value(bf16_bits(4096.0))).all()
    x[0, 0] = 0.0
    arrays["x"] = bf16_bits(x)
    assert (bf16_value(agree("block_linear", arrays)["y"]) == 2.0**-10).all()


# ------------------------------------------------------------------ rotation and KV rows


@pytest.mark.parametrize("yarn", [0, 1])
@pytest.mark.parametrize("inverse", [0, 1])
def test_rope_at_the_ends_of_the_positions(yarn, inverse):
    arrays = make("rope", 3, T=6, h=2, D=512, yarn=yarn, inverse=inverse)
    arrays["pos"][:] = [0, 1, 65535, 65536, 1048574, 1048575]
    want = agree("rope", arrays)["x"]
    assert np.array_equal(want[0], arrays["x"][0]), "position 0 changes nothing"
    assert np.array_equal(want[..., :448], arrays["x"][..., :448]), "only the last 64 rotate"


def test_kv_pack_every_magnitude():
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
    agree("kv_pack", {"kv": kv})


def test_kv_pack_ties_go_to_the_even_code():
    kv = np.zeros((1, 512), np.float32)
    kv[0, 0] = 448.0  # the scale is 1
    kv[0, 1:5] = [1.0625, 1.1875, -1.0625, 2.0**-10]  # ties of 1 | 1.125 | 1.25; half a subnormal
    kv[0, 5:7] = [3 * 2.0**-10, 432.0]
    kv[0, 448:451] = [1.00390625, 1.01171875, -1.00390625]  # bf16 ties
    want = agree("kv_pack", {"kv": kv})["rows"][0]
    values = e4m3_value(want[:8])
    assert values[1:7].tolist() == [1.0, 1.25, -1.0, 0.0, 2 * 2.0**-9, 448.0]
    tail = bf16_value(want[448:454].copy().view("<u2"))
    assert tail.tolist() == [1.0, 1.015625, -1.0]


def test_kv_rows_survive_a_second_packing():
    rows = make("kv_unpack", 6, T=8)["rows"]
    for platform in PLATFORMS:
        kv = run("kv_unpack", platform, {"rows": rows})["kv"]
        again = run("kv_unpack", platform, run("kv_pack", platform, {"kv": kv}))["kv"]
        # A group whose codes all rounded down may take the next smaller scale; values stay.
        assert np.array_equal(again, kv)


def test_kv_unpack_every_code():
    rows = np.zeros((2, 584), np.uint8)
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    rows[0, : len(codes)] = codes
    rows[0, 576:583] = [127, 120, 105, 130, 1, 127, 127]
    rows[1, 448:576] = np.arange(64, dtype="<u2").view(np.uint8)  # bf16 subnormals
    rows[1, 576:583] = 127
    agree("kv_unpack", {"rows": rows})


# ------------------------------------------------------------------ attention and compressor


def attention(**changes):
    return make("sparse_attention", 9, T=4, h=2, S=140, s=128, E=30, n=20) | changes


def test_attention_with_all_keys_padded_gives_zero():
    arrays = attention()
    arrays["swa_idx"][1] = -1
    arrays["extra_idx"][1] = -1
    for sink in (0.5, -np.inf):
        arrays["sink"] = np.array([sink, sink], np.float32)
        want = agree("sparse_attention", arrays)["o"]
        assert not want[1].any() and want[0].any()


def test_attention_sink_that_dominates():
    arrays = attention(sink=np.array([1e4, 80.0], np.float32))
    want = bf16_value(agree("sparse_attention", arrays)["o"])
    assert not want[:, 0].any(), "exp(s - 1e4) is nothing"


def test_attention_without_a_sink_averages():
    """One key and no sink: the output is the key, whatever the query."""
    arrays = attention(sink=np.full(2, -np.inf, np.float32))
    arrays["swa_idx"][:] = -1
    arrays["extra_idx"][:] = -1
    arrays["swa_idx"][:, 77] = [3, 5, 139, 0]
    want = bf16_value(agree("sparse_attention", arrays)["o"])
    keys = OPS["kv_unpack"]({"rows": arrays["swa"]})["kv"].astype(np.float64)
    for t, j in enumerate([3, 5, 139, 0]):
        assert np.array_equal(want[t, 0], bf16_value(bf16_bits(keys[j])))


def test_attention_counts_the_sink_once_and_unscaled():
    """Zero query: every score is 0, so each key weighs 1 and the sink exp(sink)."""
    arrays = attention()
    arrays["q"][:] = 0
    arrays["sink"] = np.array([0.0, np.log(256.0)], np.float32)
    arrays["swa_idx"][:] = -1
    arrays["extra_idx"][:] = -1
    arrays["swa_idx"][:, :3] = [0, 1, 2]
    want = bf16_value(agree("sparse_attention", arrays)["o"])
    keys = OPS["kv_unpack"]({"rows": arrays["swa"][:3]})["kv"].astype(np.float64)
    np.testing.assert_allclose(want[0, 0], keys.sum(0) / 4, atol=1e-2)
    np.testing.assert_allclose(want[0, 1], keys.sum(0) / 259, atol=1e-3)


def test_attention_scores_far_apart():
    """Scores in the thousands: a softmax without a shift would overflow."""
    arrays = attention()
    arrays["q"] = bf16_bits(bf16_value(arrays["q"]) * 500)
    agree("sparse_attention", arrays)


def test_attention_with_no_extra_keys():
    agree("sparse_attention", make("sparse_attention", 2, T=2, h=1, S=130, s=128, E=0, n=0))
    agree("sparse_attention", make("sparse_attention", 3, T=2, h=1, S=130, s=128, E=7, n=0))


def test_attention_takes_a_key_twice_when_it_is_listed_twice():
    """Window and compressed set overlap; nothing is deduplicated."""
    arrays = attention(sink=np.zeros(2, np.float32))
    arrays["q"][:] = 0
    arrays["swa_idx"][:] = -1
    arrays["extra_idx"][:] = -1
    arrays["swa_idx"][:, :2] = 1
    want = bf16_value(agree("sparse_attention", arrays)["o"])
    key = OPS["kv_unpack"]({"rows": arrays["swa"][1:2]})["kv"][0].astype(np.float64)
    assert np.array_equal(want[0, 0], bf16_value(bf16_bits(key * 2 / 3)))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_compress_drops_a_pair_that_is_not_whole(length):
    arrays = make("compress", 3, L=length, H=32, ratio=2)
    assert agree("compress", arrays)["kv"].shape == (length // 2, 512)


def test_compress_with_equal_and_far_apart_scores():
    arrays = make("compress", 4, L=6, H=32, ratio=2)
    arrays["x"][1] = arrays["x"][0]  # equal scores: the mean
    arrays["x"][2:4] = bf16_bits(bf16_value(arrays["x"][2:4]) * 300)  # one takes all
    agree("compress", arrays)


@pytest.mark.parametrize("ratio", [1, 2])
def test_compress_of_zero_tiny_and_huge_rows(ratio):
    arrays = make("compress", 5, L=8, H=32, ratio=ratio)
    arrays["x"][0:2] = 0
    arrays["x"][2:4] = bf16_bits(bf16_value(arrays["x"][2:4]) * 2.0**-60)
    arrays["x"][4:6] = bf16_bits(bf16_value(arrays["x"][4:6]) * 2.0**40)
    want = agree("compress", arrays)["kv"]
    assert not want[0].any()


def test_compress_saturates_its_fp4_scale():
    """Norm gains of 2^12 put amax / 6 past e4m3's 448; gains of 2^-14 below its 2^-9."""
    arrays = make("compress", 6, L=4, H=32, ratio=1)
    gain = bf16_value(arrays["norm"])
    gain[:128] *= 2.0**12
    gain[128:256] *= 2.0**-14
    arrays["norm"] = bf16_bits(gain)
    want = np.abs(agree("compress", arrays)["kv"])
    assert want[:, :128].max() == 448 * 6
    assert set(np.unique(want[:, 128:256])) <= {k * 2.0**-9 for k in (0, 0.5, 1, 1.5, 2, 3, 4, 6)}


# ------------------------------------------------------------------ index


def test_index_query_fp4_ties_and_zero_groups():
    arrays = make("index_query", 1, T=1, h=1)
    arrays["pos"][:] = 0
    q = np.zeros((1, 1, 128))
    q[0, 0, :9] = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25]
    q[0, 0, 32:35] = [2.0**-120, -(2.0**-121), 2.0**-130]
    arrays["q"] = bf16_bits(q)
    want = bf16_value(agree("index_query", arrays)["iq"])[0, 0]
    assert want[:9].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0]
    assert not want[64:].any()


def test_index_select_ties_go_to_the_lowest_position():
    arrays = make("index_select", 1, T=2, h=1, N=40, k=8)
    arrays["ik"][:] = arrays["ik"][0]  # every score is equal
    arrays["count"][:] = [40, 5]
    arrays["weights"][:] = 1.0
    want = agree_exactly("index_select", arrays)["idx"]
    assert want[0].tolist() == list(range(8))
    assert want[1].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_index_select_with_nothing_to_select():
    arrays = make("index_select", 2, T=2, h=2, N=20, k=4)
    arrays["count"][:] = [0, 4]
    want = agree_exactly("index_select", arrays)["idx"]
    assert want.tolist() == [[-1] * 4, [0, 1, 2, 3]]


def test_index_select_with_negative_weights_prefers_the_silent_keys():
    arrays = make("index_select", 3, T=1, h=1, N=30, k=5)
    arrays["weights"][:] = -1.0
    agree("index_select", arrays)


# ------------------------------------------------------------------ routing and experts


def test_gate_ties_go_to_the_lowest_id():
    arrays = make("gate", 1, T=2, H=32, E=12)
    arrays["w"][:] = arrays["w"][0]
    arrays["bias"][:] = 0.0
    arrays["bias"][7] = 1.0
    out = agree("gate", arrays)
    for platform in PLATFORMS:
        assert np.array_equal(run("gate", platform, arrays)["ids"], out["ids"]), platform
    assert out["ids"][0].tolist() == [7, 0, 1, 2, 3, 4]
    np.testing.assert_allclose(out["weight"], 0.25, rtol=1e-6)


@pytest.mark.parametrize("k", [3, 6])
def test_gate_bias_ranks_but_does_not_weigh(k):
    arrays = make("gate", 2, T=3, H=32, E=10, k=k)
    biased = dict(arrays, bias=np.where(np.arange(10) < k, 50.0, 0.0).astype(np.float32))
    out = agree("gate", biased)
    assert set(out["ids"][0].tolist()) == set(range(k))
    np.testing.assert_allclose(out["weight"].sum(1), 1.5, rtol=1e-6)


@pytest.mark.parametrize("k", [3, 6])
def test_gate_logits_of_every_size(k):
    """Beyond 20 softplus is the identity; far below zero scores vanish, and so may their sum."""
    arrays = make("gate", 3, T=6, H=32, E=8, k=k)
    x = np.zeros((6, 32))
    x[:, 0] = [19.9, 20.1, 200.0, -30.0, -90.0, -3000.0]
    arrays["x"] = bf16_bits(x)
    w = np.zeros((8, 32))
    w[:, 0] = np.linspace(0.9, 1.1, 8)
    arrays["w"] = bf16_bits(w)
    arrays["bias"] = np.linspace(0, 1e-3, 8).astype(np.float32)
    assert np.isfinite(agree("gate", arrays)["weight"]).all()


def test_experts_clamp_gate_from_above_only():
    arrays = make("experts", 1, T=4, E=6, H=32, I=32)
    arrays["x"] = bf16_bits(bf16_value(arrays["x"]) * 200)
    agree("experts", arrays)


def test_experts_at_zero_weight_leave_the_shared_one():
    arrays = make("experts", 2, T=3, E=6, H=32, I=32)
    arrays["weight"][:] = 0.0
    want = agree("experts", arrays)["y"]
    arrays["ids"] = np.roll(arrays["ids"], 1, axis=1)
    assert np.array_equal(agree("experts", arrays)["y"], want)


def test_experts_of_zero_rows():
    arrays = make("experts", 3, T=2, E=6, H=32, I=32)
    arrays["x"][0] = 0x8000
    assert not agree("experts", arrays)["y"][0].any()


def test_experts_that_share_a_row_or_stand_idle():
    arrays = make("experts", 4, T=8, E=9, H=64, I=32)
    arrays["ids"][:] = [8, 0, 3, 5, 1, 2]  # everyone on the same six; 4, 6 and 7 idle
    agree("experts", arrays)


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
    ids = agree("engram_hash", arrays)["ids"]
    same = dict(arrays, token=np.array([5], np.int64), pos=np.array([100], np.int64))
    same["history"] = np.array([[2, 2, 2]], np.int64)
    assert np.array_equal(OPS["engram_hash"](same)["ids"][0], ids[1])
    assert np.array_equal(ids[4], ids[0]) and not np.array_equal(ids[3], ids[0])
    assert np.array_equal(ids[5], ids[1]), "blocked by an image token as by the start"
    assert np.array_equal(ids[6], ids[2]) and np.array_equal(ids[7], ids[3])


def test_engram_hash_at_the_largest_products():
    arrays = make("engram_hash", 2, T=4, V=40)
    arrays["map"][:] = 99091
    arrays["mult"][:] = 2 * 46539438283890 + 1  # the largest that the published draw can give
    agree("engram_hash", arrays)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 64.0])
def test_engram_apply_gates_of_both_signs(scale):
    """At |dot| below 1e-6 the gate is sigmoid(+-1e-3); large ones saturate."""
    arrays = make("engram_apply", 1, T=4, H=32, D=32)
    for name in ("q_weight", "k_weight"):
        arrays[name] = bf16_bits(bf16_value(arrays[name]) * scale)
    agree("engram_apply", arrays)


def test_engram_apply_of_a_zero_lookup_changes_nothing():
    arrays = make("engram_apply", 2, T=2, H=32, D=32)
    arrays["e"][0] = 0
    arrays["residual"][1, 2] = 0
    want = agree("engram_apply", arrays)["residual"]
    assert np.array_equal(want[0], arrays["residual"][0])


# ------------------------------------------------------------------ drafting and accepting


def test_markov_draft_greedy_ties_go_to_the_lowest_id():
    arrays = make("markov_draft", 1, B=2, g=5, V=16, R=4)
    arrays["base"][:] = 0.0
    arrays["base"][:, :, [3, 9]] = 4.0
    arrays["w2"][:] = 0
    arrays["temp"][:] = 0.0
    assert (agree_exactly("markov_draft", arrays)["tokens"] == 3).all()


def test_markov_draft_rounds_the_bias_to_bf16():
    """1 + 2^-9 rounds to 1, so ids 2 and 5 tie and the lower one wins; unrounded, 5 would."""
    arrays = make("markov_draft", 2, B=1, g=1, V=8, R=4)
    arrays["base"][:] = 0.0
    arrays["temp"][:] = 0.0
    arrays["anchor"][:] = 0
    w1, w2 = np.zeros((8, 4)), np.zeros((8, 4))
    w1[0] = [1.0, 2.0**-9, 0, 0]
    w2[2, 0] = 1.0
    w2[5, :2] = 1.0
    arrays["w1"], arrays["w2"] = bf16_bits(w1), bf16_bits(w2)
    want = agree_exactly("markov_draft", arrays)
    assert want["tokens"][0, 0] == 2 and want["logits"][0, 0, 5] == 1.0


def test_markov_draft_mixed_temperatures():
    arrays = make("markov_draft", 3, B=6, g=5, V=32, R=8)
    arrays["temp"][:] = [0.0, 1e-7, 1e-5, 0.7, 5.0, 0.0]
    want = agree("markov_draft", arrays)["tokens"]
    # Temperatures below 1e-5 count as 1e-5: the noise cannot move the argmax of such scores.
    greedy = agree("markov_draft", arrays | {"temp": np.zeros(6, np.float32)})["tokens"]
    assert np.array_equal(want[:3], greedy[:3]) and np.array_equal(want[5], greedy[5])


def acceptance(**changes):
    return make("accept", 5, B=6, g=5, V=16) | changes


def test_accept_all_and_none_greedy():
    arrays = acceptance(temp=np.zeros(6, np.float32))
    best = arrays["target_logits"].argmax(-1)
    arrays["draft"] = best[:, :5].astype(np.int64)
    arrays["draft"][3:, 0] = (best[3:, 0] + 1) % 16
    want = agree("accept", arrays)
    assert want["accepted"].tolist() == [5, 5, 5, 0, 0, 0]
    assert np.array_equal(want["next"][:3], best[:3, 5])
    assert np.array_equal(want["next"][3:], best[3:, 0])


def test_accept_all_and_none_at_temperature():
    arrays = acceptance(temp=np.full(6, 0.8, np.float32))
    arrays["draft_logits"] = arrays["target_logits"][:, :5].copy()  # p = q: u q < p always
    arrays["draft_logits"][3:, 0] = -60.0
    arrays["target_logits"][3:, 0, :] = 0.0
    arrays["draft_logits"][3:, 0, 7] = 60.0  # q is one-hot at 7, p uniform
    arrays["draft"][3:, 0] = 7
    arrays["coins"][3:, 0] = 0.5  # 0.5 * 1 >= 1/16: rejected
    want = agree("accept", arrays)
    assert want["accepted"].tolist() == [5, 5, 5, 0, 0, 0]
    assert (want["next"][3:] != 7).all(), "the residual has nothing at the rejected id"


def test_accept_greedy_ties_go_to_the_lowest_id():
    arrays = acceptance(temp=np.zeros(6, np.float32))
    arrays["target_logits"][:] = 0.0
    arrays["target_logits"][:, :, [4, 11]] = 3.0
    arrays["draft"][:] = 4
    arrays["draft"][1] = 11
    want = agree_exactly("accept", arrays)
    assert want["accepted"].tolist() == [5, 0, 5, 5, 5, 5] and (want["next"] == 4).all()


def test_accept_coins_at_their_ends():
    arrays = acceptance(temp=np.full(6, 1.0, np.float32))
    arrays["coins"][:3] = 0.0
    arrays["coins"][3:] = np.nextafter(np.float32(1), np.float32(0))
    agree("accept", arrays)


def test_accept_with_nothing_left_takes_the_last_id():
    """p has no weight where the draft went and equals q elsewhere: a residual of zero."""
    arrays = acceptance(temp=np.full(6, 1.0, np.float32))
    row = np.zeros(16, np.float32)
    row[3] = -200.0  # exp(-200) / 15 is 0 in fp32, and far below any coin in float64
    arrays["target_logits"][:, 0] = row
    arrays["draft_logits"][:, 0] = 0.0
    arrays["draft"][:, 0] = 3
    arrays["coins"][:, 0] = 0.5
    want = agree("accept", arrays)
    assert (want["accepted"] == 0).all()


def test_accept_mixed_temperatures():
    arrays = acceptance(temp=np.array([0.0, 1e-9, 1e-5, 0.5, 1.0, 4.0], np.float32))
    agree("accept", arrays)
