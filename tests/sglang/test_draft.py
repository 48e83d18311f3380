"""The DSpark draft sampler: SGLang's own sampler object with our factory behind it, beside its own
Markov block; and the noise of our drafts beside SGLang's.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import served
import torch
from lowlat import _dispatch, _kernels, build, guard
from oracle.formats import bf16_bits
from oracle.model import Model as Oracle
from sglang.kernels.ops.speculative.dspark.markov_sample import MarkovSampleStep, _philox
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.layers import dp_attention
from sglang.srt.models.deepseek_v4_dspark import DSparkV4MarkovHead
from sglang.srt.speculative.dspark_components import dspark_draft_sampler
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_noise_key
from sglang.srt.speculative.spec_tp_sync import SpecTpSync
from support import kernels_abi as abi
from support import replay, small_model

# SGLang pads a vocabulary to a multiple of 64; this one, as the true one, needs none.
GAMMA, VOCAB, RANK, HIDDEN, MAX_BS = served.GAMMA, 128, 16, 32, 10
ARCHITECTURE = "LowlatTestForCausalLM"
SEED = 3


def bits(tensor):
    return tensor.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


class Kernels(served.Kernels):
    """The scalar kernels of the proposal, each by its own operation, and SGLang's head."""

    def draft(
        self,
        *,
        hidden,
        anchors,
        head,
        temperatures,
        noise_key,
        noise_offset,
        out_tokens,
        out_logits,
    ):
        batch_size, gamma = out_tokens.shape
        markov = self.request.model.markov_head
        base = (hidden.float() @ head.weight.float().T).view(batch_size, gamma, -1)
        greedy = temperatures is None
        temp = torch.zeros(batch_size) if greedy else temperatures
        made = _kernels.run_op(
            "markov_draft",
            "v41",
            "scalar",
            {
                "base": base.numpy(),
                "w1": bits(markov.markov_w1.weight),
                "w2": bits(markov.markov_w2.weight),
                "anchor": anchors.numpy(),
                "temp": temp.numpy(),
                "uniform": uniform(batch_size, gamma, noise_key, noise_offset),
            },
        )
        out_tokens.copy_(torch.from_numpy(made["tokens"]))
        if out_logits is not None:
            out_logits.copy_(torch.from_numpy(made["logits"]))
        return hidden


def uniform(batch_size, gamma, key, offset):
    """The noise of the contract: word id mod 4 of the block (id / 4, row, step, offset)."""
    quads = torch.arange(-(-VOCAB // 4))
    words = _philox(
        key,
        quads[None, None, :],
        torch.arange(batch_size)[:, None, None],
        torch.arange(gamma)[None, :, None],
        offset.reshape(1, 1, 1) & 0xFFFFFFFF,
    )
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1).reshape(batch_size, gamma, -1)
    return ((words[..., :VOCAB].double() + 0.5) / 2**32).float().numpy()


class Draft(torch.nn.Module):
    """What SGLang's sampler needs of a draft model: its Markov head is SGLang's own class."""

    sample_from_anchor = True
    confidence_head = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        self.markov_head = DSparkV4MarkovHead(vocab_size=VOCAB, markov_rank=RANK)
        for weight in (self.markov_head.markov_w1.weight, self.markov_head.markov_w2.weight):
            weight.data = torch.randn(weight.shape).to(torch.bfloat16)
        self.lm_head = None

    def attach(self):
        self.lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight.data = torch.randn(VOCAB, HIDDEN)
        self.lm_head.org_vocab_size = VOCAB

    def compute_base_logits(self, hidden):
        return hidden.float() @ self.lm_head.weight.float().T, hidden


@pytest.fixture
def one_rank(monkeypatch):
    """SGLang's group for the sampler's agreement and token sync, of this process alone."""
    group = SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)
    monkeypatch.setattr(dspark_draft_sampler, "get_dp_tp_group", lambda: group)
    monkeypatch.setattr(dp_attention, "get_dp_tp_group", lambda: group)
    return group


@pytest.fixture
def samplers(gpu, one_rank, monkeypatch):
    """Two samplers of SGLang's over one draft model: with our factory, and with its own block."""

    def make(*, greedy=False, gamma=GAMMA):
        with served.server(), pytest.MonkeyPatch.context() as patch:
            model = Draft()
            patch.setattr(guard, "table", lambda config, rows: SimpleNamespace(draft=list))
            config = served.hf_config(_dispatch.built_in("tiny-v41"))
            context = SimpleNamespace(
                widths=(), tokens_per_request=GAMMA + 1, deadline_s=60.0, binding=None
            )
            ours = build.build_draft(model, config, context, Kernels, build.place(served.ISA))
            model.attach()
            model.__dict__["_megakernel"] = ours
            pair = []
            for factory in (binding.megakernel_draft_sampler(model), None):
                noise = DraftNoise(draft_noise_key(7), torch.tensor([(1 << 32) + 5]))
                pair.append(
                    dspark_draft_sampler.DsparkDraftSampler(
                        model=model,
                        gamma=gamma,
                        max_bs=MAX_BS,
                        device="cpu",
                        noise=noise,
                        tp_sync=SpecTpSync(one_rank),
                        greedy_draft=greedy,
                        megakernel_sampler=factory,
                    )
                )
        return pair

    return make


def propose(sampler, batch_size, seed, temperatures):
    """One block, as the tail of SGLang's draft graph makes it."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch_size * sampler.gamma, HIDDEN, generator=generator)
    block = torch.randint(0, VOCAB, (batch_size, sampler.gamma), generator=generator)
    sampler.params.step_temperatures[:batch_size] = torch.tensor(temperatures)
    with torch.no_grad(), served.server():
        sampler(hidden, block.view(-1))
    return sampler.out[: batch_size * sampler.gamma].clone().view(batch_size, sampler.gamma)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_sampled_proposals_are_sglangs_own(samplers, batch_size, seed) -> None:
    ours, own = samplers()
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


# ------------------------------------------------------------------ noise of whole drafts


@pytest.mark.parametrize("temperatures", [(0.7, 1.3), (0.0, 4.0)])
def test_drafts_of_the_kernels_are_picked_by_sglangs_rule_and_noise(
    temperatures, monkeypatch
) -> None:
    """The whole draft by the C ABI: from the logits that it gives, SGLang's step picks the very
    same tokens, with the row, the step and the low word of the offset that the draft was given."""
    path = abi.library_path()
    if path is None:
        pytest.skip("no kernel library: set LOWLAT_KERNELS or install the package")
    monkeypatch.setattr(replay, "TEMPERATURES", temperatures)
    weights = small_model.Weights(small_model.MODELS["short"], SEED, 1)
    group = small_model.create(path, weights)
    try:
        run = replay.Replay(group, Oracle(weights.small.config, weights.whole, 1), SEED)
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
