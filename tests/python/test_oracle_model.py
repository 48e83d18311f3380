"""The whole-model oracle of V4 against closed forms, where a model is made simple enough for one.

What a kernel is held to must be right by itself: here no kernel is needed.
"""

import numpy as np
import pytest
from oracle.compress import finished_v4, pooled_v4
from oracle.formats import bf, bf16_bits, bf16_value
from oracle.mix import HC_EPS, norm, sigmoid
from oracle.model_v4 import ModelV4
from oracle.rope_kv import NOPE_DIM, rotate
from oracle.tensors import v4_weights
from support import small_model

# Either ratio, and a layer whose experts are the token's.
SMALL = small_model.small_model(
    small_model.V4_SIZES,
    small_model.v4_layers([4, 128, 4], num_hash_layers=1),
    lengths=small_model.SECOND_ENTRY,
    larger={"ffn.experts.w": -1, "wo_b": 1},
    entry_size=2.0,
)
CONFIG = SMALL.config
EPS = 1e-6


@pytest.fixture
def weights():
    return small_model.Weights(SMALL, 5, 1).make_whole(v4_weights(CONFIG))


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(3, 93, count)


def silence(weights, *parts):
    """Zeroes the codes of the linears with such a name: what they give is zero."""
    for name in weights:
        if name.endswith(".weight") and any(part in name for part in parts):
            weights[name] = np.zeros_like(weights[name])


def head_by_hand(weights, embedded, prefix):
    """Logits where all four streams are the embedding, row by row."""
    fn, base, scale = (
        weights[f"{prefix}hc_head_{p}"].astype(float) for p in ("fn", "base", "scale")
    )
    out = []
    for e in embedded:
        x = np.concatenate([e] * 4)
        r = 1.0 / np.sqrt((x * x).sum() / len(x) + EPS)
        pre = sigmoid(fn @ x * r * scale[0] + base) + HC_EPS
        h = bf(sum(pre[k] * e for k in range(4)))
        h = bf(h / np.sqrt((h * h).mean() + EPS) * bf16_value(weights[prefix + "norm.weight"]))
        out.append(bf(bf16_value(weights["head.weight"]) @ h))
    return np.array(out)


def test_silent_sublayers_leave_the_embedding(weights):
    """A column of comb sums to a little less than one, which bf16 does not see."""
    silence(weights, "wo_b", "experts.w2")
    model, text = ModelV4(CONFIG, weights), tokens(9)
    trace = model.run(text)
    embedded = bf16_value(weights["embed.weight"])
    assert np.array_equal(trace.features, np.tile(embedded[text], (1, 3)))
    assert np.array_equal(trace.logits, head_by_hand(weights, embedded[text], ""))
    base, _ = model.draft(trace.features, text[-1])
    rows = embedded[[text[-1]] + [CONFIG["draft_mask_token"]] * 4]
    assert np.array_equal(base, head_by_hand(weights, rows, "mtp.2."))


class Watched(ModelV4):
    """Keeps the window keys and what the attention gave, of every layer's last run."""

    def window_keys(self, kv, prefix, pos, yarn):
        keys = super().window_keys(kv, prefix, pos, yarn)
        self.keys[prefix] = keys
        return keys

    def project_out(self, o, prefix, group_outputs):
        self.outputs[prefix] = o
        return super().project_out(o, prefix, group_outputs)

    def __init__(self, *args):
        super().__init__(*args)
        self.keys, self.outputs = {}, {}


def test_queries_of_zero_weigh_every_key_alike(weights):
    """Each key by 1 / (keys + exp(sink)): says which keys there are, and that they are values."""
    silence(weights, "attn.wq_b")
    model, text = Watched(CONFIG, weights), tokens(260)
    trace = model.run(text)
    for layer, plan in enumerate(CONFIG["layers"]):
        sink = np.exp(weights[f"layers.{layer}.attn.attn_sink"].astype(float))
        for t in (0, 3, 11, 12, 126, 127, 200, 255, 256, 259):
            keys = [trace.swa[layer][i] for i in range(t + 1) if t - i < CONFIG["window"]]
            there = (t + 1) // plan["ratio"]
            if plan["ratio"] == 128:
                keys += [trace.extra[layer][n] for n in range(there)]
            else:
                picks = trace.entries[layer].picks[t]
                assert len(set(picks)) == min(there, CONFIG["index_topk"]) and (picks < there).all()
                keys += [trace.extra[layer][n] for n in picks]
            want = np.sum(keys, 0) / (len(keys) + sink[:, None])
            want[:, NOPE_DIM:] = rotate(bf(want)[None, :, NOPE_DIM:], [t], True, inverse=True)
            got = model.outputs[f"layers.{layer}."][t]
            np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=1e-3)


def test_a_draft_block_sees_all_of_itself(weights):
    """With queries of zero its rows differ by their rotation only."""
    silence(weights, "attn.wq_b")
    model, text = Watched(CONFIG, weights), tokens(40)
    trace = model.run(text)
    contexts = model.draft_context(trace.features)
    model.draft(trace.features, text[-1])
    for stage, context in enumerate(contexts):
        sink = np.exp(weights[f"mtp.{stage}.attn.attn_sink"].astype(float))[:, None]
        own = model.keys[f"mtp.{stage}."]
        assert len(own) == 5
        keys = np.concatenate([context[-CONFIG["window"] :], own])[:, :NOPE_DIM]
        got = model.outputs[f"mtp.{stage}."][..., :NOPE_DIM]
        want = np.tile(keys.sum(0) / (len(keys) + sink), (5, 1, 1))
        np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=1e-3)


def test_the_past_does_not_depend_on_what_follows(weights):
    model, text = ModelV4(CONFIG, weights), tokens(150)
    whole = model.run(text)
    for count in (1, 4, 127, 128):
        part = model.run(text[:count])
        assert np.array_equal(part.logits, whole.logits[:count])
        assert np.array_equal(part.features, whole.features[:count])
        for layer, plan in enumerate(CONFIG["layers"]):
            n = count // plan["ratio"]
            assert np.array_equal(part.extra[layer], whole.extra[layer][:n])


def test_a_rank_without_weights_adds_nothing(weights):
    """Where all of wo_b and of the experts' w2 is on rank 0, two ranks are one."""
    for name in weights:
        if name.endswith(("attn.wo_b.weight", "shared_experts.w2.weight", "ffn.experts.w2.weight")):
            weights[name] = weights[name].copy()
            weights[name][..., weights[name].shape[-1] // 2 :] = 0
    text = tokens(70)
    one, two = (ModelV4(CONFIG, weights, tp_size).run(text) for tp_size in (1, 2))
    assert np.array_equal(one.logits, two.logits)


def test_the_token_alone_chooses_the_experts_of_a_hash_layer(weights):
    text = tokens(30)
    before = ModelV4(CONFIG, weights).run(text)
    table = weights["layers.0.ffn.gate.tid2eid"]
    assert np.array_equal(np.stack(before.gates[0].picks), table[text])
    absent = np.setdiff1d(np.arange(CONFIG["vocab"]), text)
    weights["layers.0.ffn.gate.tid2eid"] = table.copy()
    weights["layers.0.ffn.gate.tid2eid"][absent] = 0
    assert np.array_equal(ModelV4(CONFIG, weights).run(text).logits, before.logits)
    # Routers of equal logits give each of the six the same share of 1.5.
    silence(weights, "layers.0.ffn.gate")
    _, weight, _ = ModelV4(CONFIG, weights).route_target(np.ones((30, CONFIG["hidden"])), text, 0)
    np.testing.assert_allclose(weight, 0.25, rtol=1e-6)


# ------------------------------------------------------------------ the rings


class Ring:
    """A compressor step by step, as it is served: projections of older tokens from a ring, those of
    this step in flight, and nothing taken back when a token is rejected."""

    def __init__(self, project, ape, ratio, size):
        self.project, self.ape, self.ratio, self.size = project, ape, ratio, size
        self.rows, self.entries = {}, {}

    def step(self, x, first):
        kv, score = self.project(x)
        end, overlap = first + len(x), 4 if self.ratio == 4 else 0
        flight = {first + i: (kv[i], score[i]) for i in range(len(x))}

        def at(pos):
            return flight[pos] if pos in flight else self.rows[pos % self.size]

        for pos in flight:
            if (pos + 1) % self.ratio == 0:
                self.entries[pos // self.ratio] = self.pool(pos + 1 - self.ratio, at)
        window = 8 if self.ratio == 4 else 128
        keep = min(end // self.ratio * self.ratio - overlap, end - (self.size - window + 2))
        for pos, row in flight.items():
            if pos >= keep:
                self.rows[pos % self.size] = row

    def pool(self, start, at):
        """Channel by channel over the block's tokens and, at ratio 4, the four before it."""
        rows = [at(start + i) for i in range(self.ratio)]
        kv, score = np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows]) + self.ape
        if self.ratio == 4:
            width = kv.shape[1] // 2
            kv, score = kv[:, width:], score[:, width:]
            if start > 0:
                rows = [at(start - 4 + i) for i in range(4)]
                before = np.stack([r[1] for r in rows]) + self.ape
                kv = np.concatenate([np.stack([r[0] for r in rows])[:, :width], kv])
                score = np.concatenate([before[:, :width], score])
        e = np.exp(score - score.max(0))
        return (e * kv).sum(0) / e.sum(0)


# Rows of the step, and how many of them are committed.
SERVED = [(13, 13), (61, 61), (51, 51), (6, 1), (6, 1), (6, 4), (1, 1), (6, 6), (114, 114)]
SERVED += [(6, 2), (6, 1), (6, 3), (6, 6), (1, 1)]


@pytest.mark.parametrize("ratio, size", [(4, 16), (128, 256)])
def test_entries_from_a_ring_are_those_of_the_whole_text(ratio, size):
    rng = np.random.default_rng(4)
    count, hidden, dim = sum(kept for _, kept in SERVED), 24, 96
    width = 2 * dim if ratio == 4 else dim
    x = rng.standard_normal((count, hidden))
    wkv, wgate = (rng.standard_normal((width, hidden)) * hidden**-0.5 for _ in range(2))
    ape = rng.standard_normal((ratio, width))
    ring = Ring(lambda rows: (rows @ wkv.T, rows @ wgate.T), ape, ratio, size)
    done = 0
    for rows, kept in SERVED:
        wrong = rng.standard_normal((rows - kept, hidden))
        ring.step(np.concatenate([x[done : done + kept], wrong]), done)
        done += kept
    want = pooled_v4(x, wkv, wgate, ape, ratio)
    assert len(want) == count // ratio >= 2
    got = np.stack([ring.entries[n] for n in range(len(want))])
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_an_entry_is_normed_and_turned_by_its_first_token():
    """One candidate that takes all of the softmax: the entry is that token's projection."""
    rng = np.random.default_rng(5)
    x, wkv = bf(rng.standard_normal((12, 32))), bf(rng.standard_normal((128, 32)))
    ape, gain = np.zeros((4, 128)), 1.0 + rng.uniform(0, 1, 64)
    ape[2, 64:] = 1e4  # of its own block the third token
    pooled = pooled_v4(x, wkv, np.zeros((128, 32)), ape, 4)
    for n, entry in enumerate(finished_v4(pooled.copy(), gain, 4)):
        want = norm(x[4 * n + 2] @ wkv[64:].T, gain, EPS)
        turned = rotate(want[None], [4 * n], yarn=True)[0]
        np.testing.assert_allclose(entry, turned, rtol=1e-12, atol=1e-12)


def test_residuals_are_bf16(weights):
    """What leaves the target is on the grid of bf16 wherever the serving path stores bf16."""
    trace = ModelV4(CONFIG, weights).run(tokens(20))
    for array in (trace.logits, trace.features):
        assert np.array_equal(bf16_value(bf16_bits(array)), array)
