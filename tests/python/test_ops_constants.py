"""The model's published constants, first against the oracle and then through the operations."""

import ml_dtypes
import numpy as np
import pytest
from oracle import MODELS, formats, index, mix, rope_kv
from oracle.cases import MULTIPLIERS, is_prime, one, primes_after
from oracle.compare import check_bound, check_exact
from oracle.run import PLATFORMS, bounds, run

YARN = """
1 0.687656022 0.472870805 0.325172456 0.223606798 0.153764561 0.105737126 0.0727107717 0.05
0.0343828011 0.0236435402 0.0162586228 0.0111803399 0.00768822805 0.00528685632 0.00363553858
0.002265625 0.00139680129 0.000849689727 0.000508081963 0.000296977778 0.000168179989
9.0867843e-05 4.54442323e-05 1.953125e-05 5.37231267e-06 3.69430316e-06 2.54040981e-06
1.74692811e-06 1.20128563e-06 8.260713e-07 5.68052904e-07
"""

# Logits ((3j + 5k) mod 7)/4 - 0.5, input stream j by output stream k.
SINKHORN = np.array(
    [
        [0.1282995, 0.4585734, 0.2065630, 0.2065631],
        [0.2065631, 0.1282995, 0.3325683, 0.3325681],
        [0.4585734, 0.2848267, 0.1282994, 0.1282996],
        [0.2065631, 0.1282995, 0.3325683, 0.3325681],
    ]
)


def sinkhorn_logits():
    j, k = np.mgrid[0:4, 0:4]
    return ((3 * j + 5 * k) % 7) / 4.0 - 0.5


def test_oracle_has_the_yarn_frequencies():
    want = np.array(YARN.split(), np.float64)
    np.testing.assert_allclose(rope_kv.inverse_frequencies(yarn=True), want, rtol=3e-7)
    plain = rope_kv.inverse_frequencies(yarn=False)
    np.testing.assert_allclose(plain, 10000.0 ** (-np.arange(32) / 32), rtol=2e-7)


def test_oracle_balances_the_example():
    np.testing.assert_allclose(mix.sinkhorn(sinkhorn_logits()), SINKHORN, atol=2e-7)


# Every platform by the rules of every model.
runs = pytest.mark.parametrize(
    "platform, model", [(platform, model) for platform in PLATFORMS for model in MODELS]
)


@runs
def test_hc_stats_balances_the_example(platform, model):
    # fn = 0 leaves m = 0, so the logits are `base` alone.
    base = np.zeros(24, np.float32)
    base[8:] = sinkhorn_logits().reshape(-1)
    base[:4] = [0.0, 100.0, -100.0, 1.0]
    base[4:8] = [0.0, 100.0, -100.0, 1.0]
    out = run(
        "hc_stats",
        platform,
        {
            "residual": formats.bf16_bits(np.ones((2, 4, 32))),
            "fn": np.zeros((24, 128), np.float32),
            "base": base,
            "scale": np.ones(3, np.float32),
        },
        model,
    )
    for row in range(2):
        np.testing.assert_allclose(out["comb"][row], SINKHORN, atol=3e-7)
        # hc_eps is added to pre after the sigmoid; post has none and is doubled.
        gate = np.array([0.5, 1.0, 0.0, 0.7310585786])
        np.testing.assert_allclose(out["pre"][row], gate + 1e-6, rtol=3e-7)
        np.testing.assert_allclose(out["post"][row], 2 * gate, rtol=3e-7, atol=1e-30)


def test_engram_primes():
    primes = primes_after(15999999, 48)
    assert primes[:3] == [16000057, 16000079, 16000081] and primes[23] == 16000463
    assert sum(primes[:24]) == 384006168
    assert primes[24:27] == [16000477, 16000487, 16000499] and primes[47] == 16000889
    assert sum(primes[24:]) == 384016682
    assert all(is_prime(p) for p in primes) and not is_prime(16000059)


def test_engram_multipliers():
    bound = ((2**63 - 1) // 99092) // 2
    assert bound == 46539438283891
    drawn = np.random.default_rng(10007).integers(0, bound, 4, np.int64) * 2 + 1
    assert drawn.tolist() == MULTIPLIERS
    drawn = np.random.default_rng(10007 * 14).integers(0, bound, 4, np.int64) * 2 + 1
    assert drawn.tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


@runs
def test_kv_scale_of_an_all_zero_group_is_byte_105(platform, model):
    rows = run("kv_pack", platform, {"kv": np.zeros((1, 512), np.float32)}, model)["rows"]
    assert rows[0, 576:].tolist() == [105] * 7 + [0]
    assert not rows[0, :576].any()


@runs
def test_kv_scales_are_the_smallest_powers_of_two_that_reach(platform, model):
    kv = np.zeros((2, 512), np.float32)
    kv[0, 0] = 448.0  # amax / 448 is exactly 1: byte 127
    kv[0, 64] = np.nextafter(np.float32(448.0), np.float32(500.0))  # just above: byte 128
    kv[0, 128] = np.nextafter(np.float32(448.0), np.float32(0.0))
    kv[1, 0], kv[1, 65] = -0.0, -3.5
    rows = run("kv_pack", platform, {"kv": kv}, model)["rows"]
    assert rows[0, 576:579].tolist() == [127, 128, 127]
    # 448 is the top code; just above it halves to 224; just below it rounds up to 448.
    assert rows[0, [0, 64, 128]].tolist() == [0x7E, 0x76, 0x7E]
    assert rows[1, 577] == 127 - 7 and rows[1, 65] == 0xFE


def test_oracle_e2m1_ties_go_to_the_even_code():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert formats.e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert formats.e2m1_code(np.array([-0.25, -0.0, 7.0, -7.0])).tolist() == [0, 0, 7, 15]


def test_oracle_formats_agree_with_ml_dtypes():
    rng = np.random.default_rng(5)
    x = rng.standard_normal(20000).astype(np.float32) * np.exp2(rng.integers(-140, 100, 20000))
    x = x.astype(np.float32)
    want = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    check_exact("bf16", formats.bf16_bits(x), want)
    y = np.clip(rng.standard_normal(20000) * np.exp2(rng.integers(-12, 9, 20000)), -448, 448)
    y = y.astype(np.float32)
    check_exact("e4m3", formats.e4m3_bits(y), y.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    z = (np.arange(-2000, 2001) / 256.0).astype(np.float32)
    want = np.clip(z, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert np.array_equal(formats.e2m1(z), want)
    assert formats.ceil_power_of_two(1.0) == 0 and formats.ceil_power_of_two(1.0000001) == 1


@runs
@pytest.mark.parametrize("yarn", [0, 1])
def test_rope_turns_unit_pairs_by_the_published_angles(platform, model, yarn):
    frequency = np.array(YARN.split(), np.float64) if yarn else 10000.0 ** (-np.arange(32) / 32)
    x = np.zeros((2, 1, 64))
    x[:, :, 0::2] = 1.0
    pos = np.array([0, 3], np.int64)
    arrays = {"x": formats.bf16_bits(x), "pos": pos, "yarn": one(yarn), "inverse": one(0)}
    out = formats.bf16_value(run("rope", platform, arrays, model)["x"])
    for t in range(2):
        np.testing.assert_allclose(out[t, 0, 0::2], np.cos(pos[t] * frequency), atol=2e-3)
        np.testing.assert_allclose(out[t, 0, 1::2], np.sin(pos[t] * frequency), atol=2e-3)
    back = dict(arrays, x=formats.bf16_bits(out), inverse=one(1))
    again = formats.bf16_value(run("rope", platform, back, model)["x"])
    np.testing.assert_allclose(again, x, atol=1e-2)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_engram_hash_of_the_real_layer(platform):
    # Token map of identity; products and the XOR worked in Python integers below.
    primes = primes_after(15999999, 24)
    arrays = {
        "token": np.array([7, 7], np.int64),
        "history": np.array([[3, 4, 5], [3, 4, 5]], np.int64),
        "pos": np.array([100, 1], np.int64),
        "map": np.arange(10, dtype=np.int64),
        "mult": np.array(MULTIPLIERS, np.int64),
        "prime": np.array(primes, np.int64).reshape(3, 8),
    }
    ids = run("engram_hash", platform, arrays)["ids"]
    m = MULTIPLIERS
    x1 = (7 * m[0]) ^ (5 * m[1])
    x2 = x1 ^ (4 * m[2])
    x3 = x2 ^ (3 * m[3])
    assert ids[0, 0] == x1 % primes[0]
    assert ids[0, 8] == x2 % primes[8] + sum(primes[:8])
    assert ids[0, 23] == x3 % primes[23] + sum(primes[:23])
    # At position 1 the two older shifts are before the start: token 2 stands for them.
    assert ids[1, 0] == ids[0, 0]
    assert ids[1, 8] == (x1 ^ (2 * m[2])) % primes[8] + sum(primes[:8])
    assert ids[1, 23] == (x1 ^ (2 * m[2]) ^ (2 * m[3])) % primes[23] + sum(primes[:23])


@runs
def test_sinkhorn_of_the_oracle_holds_for_the_example_within_the_bound(platform, model):
    arrays = {
        "residual": formats.bf16_bits(np.ones((1, 4, 32))),
        "fn": np.zeros((24, 128), np.float32),
        "base": np.concatenate([np.zeros(8), sinkhorn_logits().reshape(-1)]).astype(np.float32),
        "scale": np.ones(3, np.float32),
    }
    want = mix.hc_stats(arrays, model)
    got = run("hc_stats", platform, arrays, model)
    for name, bound in bounds("hc_stats", platform, model).items():
        check_bound(name, bound, got[name], want[name])


def test_oracle_hadamard_is_orthonormal_and_symmetric():
    matrix = index.hadamard(np.eye(128))
    np.testing.assert_allclose(matrix @ matrix, np.eye(128), atol=1e-15)
    assert np.array_equal(matrix, matrix.T)
    # Sylvester's order: row 1 alternates, row 64 is one half and then minus it.
    assert (matrix[1, :4] > 0).tolist() == [True, False, True, False]
    assert (matrix[64, [0, 63, 64, 127]] > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_index_scales_of_v4_have_a_floor_and_no_power_of_two(platform):
    q = np.zeros((2, 1, 128))
    q[1, 0, 0] = 3.0 * 128**0.5
    arrays = {"q": formats.bf16_bits(q), "pos": np.zeros(2, np.int64)}
    out = run("index_query", platform, arrays, "v4")
    amax = formats.bf16_value(arrays["q"])[1, 0, 0] * 128**-0.5
    np.testing.assert_allclose(out["qs"][:, 0], [2.2321e-7, amax / 448], rtol=2e-5)
    assert not out["iq"][0].any() and (out["iq"][1] == 0x7E).all()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_compressed_keys_of_v4_turn_at_their_first_token(platform):
    """No gate, no bias, one input: every token of a block has the same value, 1 in every channel,
    and the norm leaves it; so entry n of ratio r shows the angles of position r n."""
    frequency = np.array(YARN.split(), np.float64)
    for ratio, width in ((4, 1024), (128, 512)):
        arrays = {
            "x": formats.bf16_bits(np.ones((3 * ratio, 1))),
            "wkv": formats.bf16_bits(np.ones((width, 1))),
            "wgate": np.zeros((width, 1), np.uint16),
            "ape": np.zeros((ratio, width), np.float32),
            "norm": formats.bf16_bits(np.ones(512)),
            "ratio": one(ratio),
        }
        kv = run("compress", platform, arrays, "v4")["kv"]
        assert (kv[:, :448] == 1.0).all()
        for n in range(3):
            cos, sin = np.cos(ratio * n * frequency), np.sin(ratio * n * frequency)
            np.testing.assert_allclose(kv[n, 448::2], cos - sin, atol=8e-3)
            np.testing.assert_allclose(kv[n, 449::2], cos + sin, atol=8e-3)
