"""A draft with SGLang's own Markov head, norm and mix of the streams, SGLang's sampler over it, and
our kernels of a proposal behind our factory.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import served
import torch
from lowlat import _dispatch, _kernels, build
from lowlat.kernels import SCALAR, HostedKernels
from sglang.kernels.ops.speculative.dspark.markov_sample import _philox
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.models.deepseek_v4 import hc_head_torch
from sglang.srt.models.deepseek_v4_dspark import DSparkV4MarkovHead
from sglang.srt.speculative.dspark_components import dspark_draft_sampler
from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_noise_key
from sglang.srt.speculative.spec_tp_sync import SpecTpSync

GAMMA, MAX_BS, STREAMS = served.GAMMA, 10, 4
SEED = 3
# SGLang's own block is sampled by each rank alone here, so that nothing but the seed makes ranks
# agree.
ALONE = SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)


def facts(name):
    """The sizes of a built-in model, by the kernels' names."""
    return SimpleNamespace(**json.loads(_dispatch.kernel_config(_dispatch.built_in(name))))


def bits(tensor):
    return tensor.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


class Operations(served.Kernels):
    """The scalar kernel of a proposal's choice as a single operation, over SGLang's base logits:
    for ranks that are processes, which the scalar platform's peers are not."""

    def draft(
        self, *, hidden, anchors, temperatures, noise_key, noise_offset, out_tokens, out_logits
    ):
        batch_size, gamma = out_tokens.shape
        model = self.request.model
        base, _ = model.compute_base_logits(hidden)
        temp = torch.zeros(batch_size) if temperatures is None else temperatures
        made = _kernels.run_op(
            "markov_draft",
            "v41",
            "scalar",
            {
                "base": base.float().view(batch_size, gamma, -1).numpy(),
                "w1": bits(model.markov_head.markov_w1.weight),
                "w2": bits(model.markov_head.markov_w2.weight),
                "anchor": anchors.numpy(),
                "temp": temp.numpy(),
                "uniform": uniform(batch_size, gamma, base.shape[-1], noise_key, noise_offset),
            },
        )
        out_tokens.copy_(torch.from_numpy(made["tokens"]))
        if out_logits is not None:
            out_logits.copy_(torch.from_numpy(made["logits"]))
        return hidden


def hosted(request):
    """The scalar kernels as the plugin binds them."""
    return HostedKernels(request, SCALAR)


def uniform(batch_size, gamma, vocab, key, offset):
    """The noise of the contract: word id mod 4 of the block (id / 4, row, step, offset)."""
    quads = torch.arange(-(-vocab // 4))
    words = _philox(
        key,
        quads[None, None, :],
        torch.arange(batch_size)[:, None, None],
        torch.arange(gamma)[None, :, None],
        offset.reshape(1, 1, 1) & 0xFFFFFFFF,
    )
    words = torch.stack(torch.broadcast_tensors(*words), dim=-1).reshape(batch_size, gamma, -1)
    return ((words[..., :vocab].double() + 0.5) / 2**32).float().numpy()


class Draft(torch.nn.Module):
    """What SGLang's sampler needs of a draft model, each part SGLang's own."""

    sample_from_anchor = True
    confidence_head = None

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(SEED)
        sizes = self.sizes = facts(name)
        self.markov_head = DSparkV4MarkovHead(vocab_size=sizes.vocab, markov_rank=sizes.markov_rank)
        for weight in (self.markov_head.markov_w1.weight, self.markov_head.markov_w2.weight):
            weight.data = torch.randn(weight.shape).to(torch.bfloat16)
        self.stages = torch.nn.ModuleList(torch.nn.Module() for _ in range(3))
        last = self.stages[-1]
        last.norm = RMSNorm(sizes.hidden, sizes.norm_eps)
        last.norm.weight.data = (1 + 0.1 * torch.randn(sizes.hidden)).to(torch.bfloat16)
        if sizes.kind == 2:
            wide = STREAMS * sizes.hidden
            for part, shape in (("fn", (STREAMS, wide)), ("base", (STREAMS,)), ("scale", (1,))):
                value = torch.randn(shape) / (wide**0.5 if part == "fn" else 2)
                last.register_parameter(f"hc_head_{part}", torch.nn.Parameter(value, False))
        self.lm_head = None

    def attach(self):
        sizes = self.sizes
        self.lm_head = torch.nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        weight = 4 * torch.randn(sizes.vocab, sizes.hidden) / sizes.hidden**0.5
        self.lm_head.weight.data = weight.to(torch.bfloat16)
        self.lm_head.org_vocab_size = sizes.vocab

    def compute_base_logits(self, hidden):
        last, sizes = self.stages[-1], self.sizes
        if sizes.kind == 2:
            hidden = hc_head_torch(
                hidden,
                last.hc_head_fn,
                last.hc_head_scale,
                last.hc_head_base,
                norm_eps=sizes.norm_eps,
                hc_eps=sizes.hc_eps,
            )
        normed = last.norm.forward_native(hidden)
        return torch.nn.functional.linear(normed, self.lm_head.weight), hidden


def samplers(group, *, greedy=False, gamma=GAMMA, name="tiny-v41", kernels=hosted):
    """Two samplers of SGLang's over one draft model: with our factory, and with its own block."""
    with served.server(group=group), pytest.MonkeyPatch.context() as patch:
        model = Draft(name)
        patch.setattr(dspark_draft_sampler, "get_dp_tp_group", lambda: group)
        config = served.hf_config(_dispatch.built_in(name))
        context = SimpleNamespace(
            widths=(), tokens_per_request=GAMMA + 1, deadline_s=60.0, binding=None
        )
        ours = build.build_draft(model, config, context, kernels, build.place(served.ISA))
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
    sizes = sampler.model.sizes
    streams = (STREAMS,) if sizes.kind == 2 else ()
    shape = (batch_size * sampler.gamma, *streams, sizes.hidden)
    hidden = torch.randn(shape, generator=generator).to(torch.bfloat16)
    block = torch.randint(0, sizes.vocab, (batch_size, sampler.gamma), generator=generator)
    sampler.params.step_temperatures[:batch_size] = torch.tensor(temperatures)
    with torch.no_grad(), served.server(group=ALONE):
        sampler(hidden, block.view(-1))
    return sampler.out[: batch_size * sampler.gamma].clone().view(batch_size, sampler.gamma)
