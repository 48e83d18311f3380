"""A small draft's layers and proposals through SGLang's dispatch and sampler contract, with the
scalar kernels bound as the plugin binds them: weights under SGLang's names and in its layouts, or
copies of the published ones by the AMD contract, which samples nothing; the draft's keys in
SGLang's own pool, the slots that a row sees made by SGLang's own functions. Proposals, their logits
and every key are those of the same kernels over caches of their own, to the bit.
"""

from types import SimpleNamespace

import numpy as np
import published
import pytest
import served
import torch
from loaded import Caches, Loaded
from lowlat import _dispatch, build
from lowlat.specs import amd
from oracle.models import make_model
from sglang.kernels.ops.speculative.dspark.dspark_attn_metadata import (
    BuildDsparkSwaPageIndices,
    ComputeDsparkWindowGather,
)
from sglang.kernels.plugin_kernels.amd.spec import BuildContext
from sglang.srt.kernel_plugins.amd import binding as amd_binding
from sglang.srt.kernel_plugins.nvidia import binding
from support import kernels_abi as abi
from support import replay
from test_forward import BOUNDS, MODELS, SEED, array, floats, grouped, opening

GAMMA = served.GAMMA
WIDTHS = tuple(range(GAMMA, 8 * GAMMA + 1, GAMMA))
NO_LAYER = {"ratio": 0, "kv_source": -1, "index_source": -1, "candidate_source": -1}


class Engine:
    """A group of one rank whose drafts run through the model that SGLang installed on, beside the
    same drafts over the group's own caches."""

    def __init__(self, group, model, built, backend, caches, *, is_amd):
        self.group, self.model, self.built = group, model, built
        self.is_amd = is_amd
        self.backend, self.caches = backend, caches
        self.lib, self.models, self.pools, self.must = (
            group.lib,
            group.models,
            group.pools,
            group.must,
        )
        self.blocks, self.unequal, self.differences = 0, [], []

    def launch(self, function, structs):
        (struct,) = structs
        if not isinstance(struct, abi.Draft) or struct.batch_size == 0:
            self.group.launch(function, structs)
            return
        # The context's keys are SGLang's to write: here they are the group's.
        size, struct.batch_size = struct.batch_size, 0
        self.group.launch(function, structs)
        struct.batch_size, struct.num_inject_rows = size, 0
        self.exchange(theirs=True)
        self.group.launch(function, structs)
        self.run(struct)
        self.exchange(theirs=False)
        self.blocks += 1

    def exchange(self, theirs):
        """Our keys to SGLang's pool; or what differs between them."""
        for stage in range(self.model.num_stages):
            own = self.pools[0][f"mtp.{stage}.kv.swa"]
            pool = self.caches.pool.get_swa_raw_buffer(stage).numpy()
            for mine, place in self.caches.window_of.items():
                if theirs:
                    pool[place] = own[mine].reshape(pool[place].shape)
                elif not np.array_equal(pool[place].reshape(-1), own[mine].reshape(-1)):
                    self.differences.append((self.blocks, stage, mine))

    def check_short_lists(self, core, given):
        """Lists of slots without a place behind a row, as SGLang makes V4's on AMD parts, are the
        same lists with such places that hold none."""
        whole, wide = core.swa_page_indices, core.swa_page_indices.clone()
        short = self.caches.config["window"] + GAMMA - 1
        wide[:, short:] = -1
        hidden = []
        for core.swa_page_indices in (wide, whole[:, :short].contiguous()):
            hidden.append(self.model.forward(*given).hidden_states)
        assert torch.equal(*(one.view(torch.int16) for one in hidden))
        core.swa_page_indices = whole

    def run(self, struct):
        size, stride = struct.batch_size, struct.page_table_stride
        page, mapping = self.caches.page_size, self.caches.pool.full_to_swa_index_mapping
        anchors, prefixes = (array(a, size) for a in (struct.anchors, struct.prefixes))
        # One request more, which only fills the batch.
        rows = (size + 1) * GAMMA
        ids = torch.full((size + 1, GAMMA), self.model.mask_token)
        ids[:size, 0] = torch.from_numpy(anchors.astype(np.int64))
        lengths = torch.from_numpy(np.append(prefixes, 0).astype(np.int32))
        positions = (lengths[:, None] + torch.arange(GAMMA)).view(-1).long()
        table = self.caches.pages(array(struct.page_table, size * stride).reshape(size, stride))
        req_to_token = torch.zeros(size + 1, stride * page, dtype=torch.int32)
        places = torch.from_numpy(table[:, :, None] * page + np.arange(page)).reshape(size, -1)
        req_to_token[:size] = places.to(torch.int32)
        out_loc = torch.zeros(rows, dtype=torch.int64)
        out_loc[: size * GAMMA] = torch.from_numpy(array(struct.slots, size * GAMMA) + page).long()
        causal = (lengths[:, None] + torch.arange(1, GAMMA + 1, dtype=torch.int32)).view(-1)
        gather = ComputeDsparkWindowGather.torch(
            seq_lens_casual=causal,
            req_pool_indices_repeated=torch.arange(size + 1).repeat_interleave(GAMMA),
            block_size=GAMMA,
            swa_window=self.caches.config["window"],
        )
        seen, _ = BuildDsparkSwaPageIndices.torch(
            req_to_token=req_to_token,
            full_to_swa_mapping=mapping,
            req_pool_indices_per_request=gather.req_pool_indices_per_request,
            offsets=gather.offsets,
            invalid=gather.invalid,
            out_loc=out_loc,
            context_lens=gather.context_lens,
            block_size=GAMMA,
            swa_window=self.caches.config["window"],
            page_index_aligned_size=64,
        )
        core = SimpleNamespace(swa_page_indices=seen)
        self.backend.forward_metadata = SimpleNamespace(core_attn_metadata=core)
        self.backend.get_swa_out_cache_loc = lambda batch: mapping[out_loc].to(torch.int32)
        given = served.batch("TARGET_VERIFY", size + 1)
        given.input_ids = ids.view(-1)
        if self.is_amd and self.blocks == 0:
            self.check_short_lists(core, (ids.view(-1), positions, given))
        before = self.model.ran
        out = self.model.forward(ids.view(-1), positions, given)
        assert self.model.ran == before and out.next_token_logits is None
        assert out.hidden_states.isfinite().all() and len(out.hidden_states) == rows
        vocab = self.model.lm_head.weight.shape[0]
        tokens = torch.zeros((size + 1) * GAMMA, dtype=torch.int64)
        logits = torch.zeros(size + 1, GAMMA, vocab)
        noise = SimpleNamespace(key=1, offset=torch.zeros(1, dtype=torch.int64))
        if self.is_amd:
            # The same kernels' proposals, which the contract does not ask for.
            made = tokens.view(size + 1, GAMMA)
            self.built.kernels.draft(
                hidden=out.hidden_states,
                anchors=ids[:, 0].contiguous(),
                temperatures=torch.zeros(size + 1),
                noise_key=noise.key,
                noise_offset=noise.offset,
                out_tokens=made,
                out_logits=logits,
            )
        else:
            steps = self.built.draft_sampler(
                gamma=GAMMA,
                max_bs=8,
                greedy_draft=False,
                noise=noise,
                draft_tokens=tokens,
                step_logits=logits,
                step_temperatures=torch.zeros(size + 1),
            )
            made, _ = steps(size + 1)(out.hidden_states, ids[:, 0])
        self.unequal += [
            (self.blocks, name)
            for name, ours, theirs in (
                ("tokens", array(struct.draft_tokens, size * GAMMA), made[:size].numpy()),
                (
                    "logits",
                    array(struct.draft_logits, size * GAMMA * vocab, np.float32),
                    logits[:size].numpy(),
                ),
            )
            if not np.array_equal(ours, theirs.reshape(-1))
        ]


def install_nvidia(model, config, open_kernels):
    """As SGLang installs a built draft, without its checks of the loaded model."""
    context = SimpleNamespace(
        widths=(),
        tokens_per_request=GAMMA + 1,
        deadline_s=60.0,
        binding=binding.MegakernelBinding(model=model),
    )
    where = build.place(served.ISA)
    built = build.build_draft(model, config, context, open_kernels, where, stages=True)
    dispatch = binding._Dispatch(built=built, original=model.forward, binding=context.binding)
    model.forward = dispatch.wrapped()
    return built


def install_amd(model, config, open_kernels):
    """The same of the AMD contract."""
    context = BuildContext(isa="gfx950", widths=WIDTHS, deadline_s=60.0, copies={})
    where = build.place(served.ISA)
    built = build.build_amd_draft(model, config, context, open_kernels, where)
    keys = amd_binding._served_keys(mode="target_verify", widths=WIDTHS, tokens=GAMMA)
    amd_binding._install_forward(model=model, built=built, served=keys, spec=amd.DRAFT)
    return built


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize("name", ["short", "v4-deep"])
def test_a_block_by_the_plugin_is_the_models_own_draft(name, vendor, gpu, monkeypatch) -> None:
    monkeypatch.setattr(replay, "TEMPERATURES", (0.0, 0.0))
    small, built_in = MODELS[name]
    group, weights, own, dtypes = grouped(small)
    is_amd = vendor == "amd"
    tensors = {} if is_amd else Loaded(own, small.config).draft()
    config = served.hf_config(_dispatch.built_in(built_in))
    model = served.Model(served.table(config).draft())
    model.num_stages = small.config["num_draft_stages"]
    model.mask_token = small.config["draft_mask_token"]
    model.embed_tokens = model.lm_head = None
    model.sample_from_anchor = True
    copies = None
    if is_amd:
        copies, experts = {}, small.config["draft_experts"] or small.config["num_experts"]
        model.config = SimpleNamespace(n_routed_experts=0, dspark_n_routed_experts=experts)
        with published.tp(1):
            for tensor in published.tensors(own, dtypes):
                amd.DRAFT.load_tensor(copies, model, *tensor)

    open_kernels = opening(small, tensors, copies)
    backend = served.Backend()
    flags = {"enable_nvidia_megakernel": not is_amd, "enable_amd_monokernel": is_amd}
    try:
        with served.server(backend=backend, **flags):
            stages = small.config | {"layers": [NO_LAYER] * model.num_stages}
            caches = Caches(stages | {"num_layers": model.num_stages})
            backend.token_to_kv_pool = caches.pool
            install = install_amd if is_amd else install_nvidia
            built = install(model, config, open_kernels)
            assert built.kernels.request.widths == WIDTHS
            # Before SGLang has attached the target's tensors it runs its own forward.
            nothing = torch.zeros(GAMMA, dtype=torch.int64)
            block = served.batch("TARGET_VERIFY", 1)
            block.input_ids = nothing
            assert model.forward(nothing, nothing, block) == "SGLang's own"
            for part, given in (("lm_head", "head"), ("embed_tokens", "embed")):
                weight = torch.from_numpy(floats(own[f"{given}.weight"])).to(torch.bfloat16)
                setattr(model, part, SimpleNamespace(weight=weight))
            engine = Engine(group, model, built, backend, caches, is_amd=is_amd)
            replay.Replay(
                engine, make_model(small.config, weights.whole, 1), SEED, small.lengths
            ).run()
            # Embeddings in place of tokens are not ours.
            assert model.forward(nothing, nothing, block, nothing) == "SGLang's own"
    finally:
        group.close()
    assert engine.blocks == 4
    # As the whole model's test holds it beside float64.
    held = max(bounds.median["draft"] for bounds in BOUNDS.values())
    assert amd.DRAFT.numerics.bounds == {"draft.logits.rel": held}
    assert engine.unequal == []
    assert engine.differences == []
