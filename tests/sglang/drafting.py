"""A draft with SGLang's own Markov head, SGLang's sampler over it, and the scalar kernels of a
proposal behind our factory.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import served
import torch
from lowlat import _dispatch, _kernels, build, guard
from sglang.kernels.ops.speculative.dspark.markov_sample import _philox
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.models.deepseek_v4_dspark import DSparkV4MarkovHead
from sglang.srt.speculative.dspark_components import dspark_draft_sampler
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_noise_key
from sglang.srt.speculative.spec_tp_sync import SpecTpSync

# SGLang pads a vocabulary to a multiple of 64; this one, as the true one, needs none.
GAMMA, VOCAB, RANK, HIDDEN, MAX_BS = served.GAMMA, 128, 16, 32, 10
SEED = 3
# SGLang's own block is sampled by each rank alone here, so that nothing but the seed makes ranks
# agree.
ALONE = SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)


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


def samplers(group, *, greedy=False, gamma=GAMMA):
    """Two samplers of SGLang's over one draft model: with our factory, and with its own block."""
    with served.server(group=group), pytest.MonkeyPatch.context() as patch:
        model = Draft()
        patch.setattr(guard, "table", lambda config, rows: SimpleNamespace(draft=list))
        patch.setattr(dspark_draft_sampler, "get_dp_tp_group", lambda: group)
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
                    tp_sync=SpecTpSync(ALONE),
                    greedy_draft=greedy,
                    megakernel_sampler=factory,
                )
            )
    return pair


def propose(sampler, batch_size, seed, temperatures):
    """One block, as the tail of SGLang's draft graph makes it."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch_size * sampler.gamma, HIDDEN, generator=generator)
    block = torch.randint(0, VOCAB, (batch_size, sampler.gamma), generator=generator)
    sampler.params.step_temperatures[:batch_size] = torch.tensor(temperatures)
    with torch.no_grad(), served.server(group=ALONE):
        sampler(hidden, block.view(-1))
    return sampler.out[: batch_size * sampler.gamma].clone().view(batch_size, sampler.gamma)
