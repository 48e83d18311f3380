"""The DSpark draft sampler: SGLang's own sampler object with our factory behind it, beside its own
Markov block; and the noise of our drafts beside SGLang's.
"""

import numpy as np
import pytest
import torch
from drafting import ALONE, GAMMA, MAX_BS, bits, propose
from drafting import samplers as make_samplers
from lowlat.reasons import RefusalError
from oracle.formats import bf16_bits
from oracle.models import make_model
from sglang.kernels.ops.speculative.dspark.markov_sample import MarkovSampleStep
from support import kernels_abi as abi
from support import replay, small_model

SEED = 3


@pytest.fixture
def samplers(gpu):
    def make(**options):
        return make_samplers(ALONE, **options)

    return make


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["tiny-v41", "tiny-v4"])
def test_sampled_proposals_are_sglangs_own(samplers, batch_size, seed, name) -> None:
    ours, own = samplers(name=name)
    temperatures = [(0.0, 0.7, 1.3, 0.2)[i % 4] for i in range(batch_size)]
    got, want = (propose(s, batch_size, seed, temperatures) for s in (ours, own))
    assert torch.equal(got, want)
    # Where tokens are sampled their logits are kept, for the acceptance rule.
    logits = [s.step_logits[:batch_size] for s in (ours, own)]
    assert torch.allclose(*logits, rtol=0, atol=2e-2)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_greedy_proposals_are_sglangs_own(samplers, batch_size) -> None:
    ours, own = samplers(greedy=True)
    got, want = (propose(s, batch_size, 1, [0.0] * batch_size) for s in (ours, own))
    assert torch.equal(got, want)
    assert ours.step_logits is None


def test_the_noise_moves_on_once_a_sampled_block_and_never_when_greedy(samplers) -> None:
    for sampler in samplers():
        before = int(sampler._noise.offset)
        for count in range(1, 4):
            propose(sampler, 2, count, [1.0, 0.0])
            assert int(sampler._noise.offset) == before + count
    ours, _ = samplers(greedy=True)
    before = int(ours._noise.offset)
    propose(ours, 2, 1, [0.0, 0.0])
    assert int(ours._noise.offset) == before


def test_the_same_block_again_is_sampled_anew(samplers) -> None:
    ours, _ = samplers()
    first = propose(ours, 8, 5, [5.0] * 8)
    assert not torch.equal(first, propose(ours, 8, 5, [5.0] * 8))


def test_buffers_of_the_graph_stay_where_they_are(samplers) -> None:
    ours, _ = samplers()
    places = [ours.out.data_ptr(), ours.step_logits.data_ptr()]
    ours.out.fill_(-1)
    ours.step_logits.fill_(float("nan"))
    propose(ours, 2, 1, [1.0, 1.0])
    assert places == [ours.out.data_ptr(), ours.step_logits.data_ptr()]
    assert (ours.out[: 2 * GAMMA] >= 0).all() and (ours.out[2 * GAMMA :] == -1).all()
    assert not ours.step_logits[:2].isnan().any() and ours.step_logits[2:].isnan().all()


def test_sizes_that_are_served_and_sglangs_block_for_the_rest(samplers) -> None:
    ours, own = samplers()
    served_sizes = [n for n in range(1, MAX_BS + 1) if ours._megakernel_steps(n) is not None]
    assert served_sizes == list(range(1, 9))
    got, want = (propose(s, 9, 2, [1.0] * 9) for s in (ours, own))
    assert torch.equal(got, want)


def test_a_server_that_drafts_another_number_keeps_sglangs_block(samplers) -> None:
    ours, own = samplers(gamma=GAMMA - 1)
    assert all(ours._megakernel_steps(n) is None for n in range(1, MAX_BS + 1))
    got, want = (propose(s, 2, 2, [1.0] * 2) for s in (ours, own))
    assert torch.equal(got, want)


def test_temperatures_of_another_type_are_refused(samplers) -> None:
    """Their address alone would be read as f32."""
    ours, _ = samplers()
    with pytest.raises(RefusalError, match=r"step_temperatures is float64.*needed f32"):
        ours.model.__dict__["_megakernel"].kernels.draft(
            hidden=torch.zeros(GAMMA, ours.model.sizes.hidden, dtype=torch.bfloat16),
            anchors=torch.zeros(1, dtype=torch.int64),
            temperatures=torch.ones(1, dtype=torch.float64),
            noise_key=0,
            noise_offset=torch.zeros(1, dtype=torch.int64),
            out_tokens=torch.zeros(1, GAMMA, dtype=torch.int64),
            out_logits=torch.zeros(1, GAMMA, ours.model.sizes.vocab),
        )


# ------------------------------------------------------------------ noise of whole drafts


@pytest.mark.parametrize("temperatures", [(0.7, 1.3), (0.0, 4.0)])
def test_drafts_of_the_kernels_are_picked_by_sglangs_rule_and_noise(
    temperatures, monkeypatch
) -> None:
    """The whole draft by the C ABI: from the logits that it gives, SGLang's step picks the very
    same tokens, with the row, the step and the low word of the offset that the draft was given."""
    path = abi.installed_kernels()
    monkeypatch.setattr(replay, "TEMPERATURES", temperatures)
    weights = small_model.Weights(small_model.MODELS["short"], SEED, 1)
    group = small_model.create(path, weights)
    try:
        oracle = make_model(weights.small.config, weights.whole, 1)
        run = replay.Replay(group, oracle, SEED, weights.small.lengths)
        run.run()
    finally:
        group.close()
    picked = 0
    for order, (tokens, logits) in zip(((0, 1), (1, 0)), run.drafts, strict=True):
        for place, request in enumerate(order):
            # The replay's own noise: rows from the back, one offset past 32 bits.
            row, offset = 1 - place, (3, (1 << 32) + 5)[place]
            temperature = temperatures[run.requests[request].state_slot]
            for step in range(replay.BLOCK):
                padded = torch.zeros(2, logits.shape[-1])
                padded[row] = torch.from_numpy(logits[place, step])
                picks = MarkovSampleStep.torch(
                    base_logits=padded,
                    bias=torch.zeros_like(padded),
                    temperatures=torch.full((2,), temperature),
                    key=replay.NOISE_KEY,
                    offset=torch.tensor([offset]),
                    step=step,
                    step_dtype=torch.float32,
                )
                assert int(picks[row]) == tokens[place, step], (place, step)
                picked += 1
    assert picked == 20


def test_the_test_has_bits_of_bf16() -> None:
    values = np.array([1.0, -2.5], np.float32)
    assert np.array_equal(bits(torch.from_numpy(values)), bf16_bits(values))
