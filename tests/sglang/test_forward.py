"""A small model through SGLang's dispatch, with the scalar kernels bound as the plugin binds them:
on NVIDIA weights under SGLang's names and in its layouts; on AMD copies of the published ones as
SGLang's iterator showed them, and V4.1's index keys in the pages of AMD parts; caches in SGLang's
own pool, metadata by its own functions. Hidden states, features and every cache are those of the
same kernels over caches of their own, to the bit; logits and features are compared with the float64
computation of ``oracle.model`` too.
"""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import published
import pytest
import served
import torch
from loaded import Caches, Loaded
from lowlat import _dispatch, build
from lowlat.kernels import SCALAR, HostedKernels
from lowlat.models.published import IN_PLACE
from lowlat.replay import View
from lowlat.specs import amd, nvidia
from lowlat.specs.alike import LOGITS_MEDIAN_REL_OF_SGLANG
from oracle.formats import bf16_bits
from oracle.models import make_model
from sglang.kernels.ops.attention.dsv4.attn_metadata_kernels import BuildPageTablePositions
from sglang.kernels.plugin_kernels.amd.spec import BuildContext
from sglang.srt.kernel_plugins.amd import binding as amd_binding
from sglang.srt.kernel_plugins.nvidia import binding
from support import kernels_abi as abi
from support import replay, small_model
from test_whole_model import BOUNDS, violations

SEED = 11
# In the order of lowlat_dtype.
KERNEL_DTYPES = ("u8", "i32", "i64", "f32", "bf16", "e4m3", "ue8m0", "fp4x2")
# SGLang's own tensors that the AMD kernels read.
READ_IN_PLACE = re.compile(
    r"model\.embed_tokens\.weight|model\.engram_hasher\.token_map"
    r"|model\.layers\.\d+\.engram\.embed\.\w+"
)
MODES = {abi.DECODE: "DECODE", abi.VERIFY: "TARGET_VERIFY", abi.EXTEND: "EXTEND"}
SMALL = small_model.MODELS


def changed(name, **fields):
    return dataclasses.replace(SMALL[name], config=SMALL[name].config | fields)


# Marlin's tiles have 64 rows, and V4.1's small models another width; a page of SGLang's index has
# 64 entries of V4 when its pages have 256 tokens.
MODELS = {
    "short": (changed("short", hidden=128), "tiny-v41"),
    "deep": (changed("deep", hidden=128), "tiny-v41"),
    "v4-deep": (changed("v4-deep", page_size=256, num_pages=4), "tiny-v4"),
}
RUNS = [(name, vendor) for name in sorted(MODELS) for vendor in ("nvidia", "amd")]
# Roundings of the others meet in another width than the bounds are of.
AS_BOUND = [run for run in RUNS if run[0] in ("short", "v4-deep")]


def floats(bits):
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def array(pointer, count, dtype=np.int32):
    """The array that a field of a step points to."""
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((abi.ct.c_char * size).from_address(pointer), dtype).copy()


class Small(HostedKernels):
    """As the plugin's, of a model whose configuration nobody published."""

    small = None

    def model_config(self):
        config = self.small.config
        names = set(super().model_config()) - {"num_widths"}
        empty = {"candidate_blocks": 0, "candidate_block_size": 0, "num_engrams": 0}
        empty |= {"engram_head_dim": 0, "engram_pad_token": 0, "engram_primes": []}
        empty |= {"engram_multipliers": []}
        request = self.request
        return {name: config.get(name, empty.get(name)) for name in names} | {
            "tp_rank": 0,
            "tp_size": 1,
            "widths": list(request.widths),
            "max_batch": 8,
            "max_rows": 48,
            "page_size": request.page_size,
            "num_pages": config["num_pages"],
            "wait_budget_ns": request.wait_budget_ns,
        }


def grouped(small):
    """A group of one rank, and its weights: whole, and its own tensors and dtypes by name."""
    weights = small_model.Weights(small, SEED, 1)
    own, dtypes = {}, {}

    def shard(spec, rank):
        own[spec.name.decode()] = value = weights.shard(spec, rank)
        dtypes[spec.name.decode()] = KERNEL_DTYPES[spec.dtype]
        return value

    group = abi.Group(abi.installed_kernels(), small.config, 1, shard)
    return group, weights, own, dtypes


def opening(small, tensors, copies):
    """Opens the kernels of such a model on scalar, over those weights."""

    def open_kernels(asked):
        page_size = small.config["page_size"]
        ours = dataclasses.replace(asked, tensors=tensors, page_size=page_size, copies=copies)
        return type("Kernels", (Small,), {"small": small})(ours, SCALAR)

    return open_kernels


class Engine:
    """A group of one rank whose target's steps go through the model that SGLang installed on. What
    is covered runs on our own caches too, and leaves the same bits."""

    def __init__(self, group, model, caches, hidden):
        self.group, self.model, self.caches, self.hidden = group, model, caches, hidden
        self.lib, self.models, self.pools = group.lib, group.models, group.pools
        self.must = group.must
        self.differences, self.unequal, self.features = [], 0, None
        self.covered_rows = []

    def launch(self, function, structs):
        (struct,) = structs
        if not isinstance(struct, abi.Step):
            self.group.launch(function, structs)
            return
        given = served.batch(MODES[struct.mode], struct.batch_size)
        given.struct, given.function, given.features = struct, function, None
        self.caches.take(self.pools[0])
        rows = struct.num_rows
        # A step of one request runs at the width of two, as in a graph that has no smaller size.
        alone = struct.mode == abi.VERIFY and struct.batch_size == 1
        padding = np.zeros(struct.tokens_per_request if alone else 0, np.int64)
        ids, positions = (
            torch.from_numpy(np.concatenate([array(given_array, rows), padding]))
            for given_array in (struct.token_ids, struct.positions)
        )
        given.batch_size += int(alone)
        self.prepare(struct, given, positions, padding)
        before = self.model.ran
        given.input_ids = ids
        logits = self.model.forward(ids, positions, given)
        self.features = None
        if self.model.ran > before:
            return
        # The same step by the model that has caches of its own.
        self.group.launch(function, structs)
        self.covered_rows.append((rows, len(padding)))
        self.differences += self.caches.differences(self.pools[0])
        seen = self.model.logits_processor.given
        assert seen.hidden.isfinite().all() and len(seen.hidden) == rows + len(padding)
        self.features = seen.aux.float().numpy()[:rows]
        own = array(struct.logits, rows * self.vocab, np.float32).reshape(rows, -1)
        theirs = floats(bf16_bits(logits.numpy()))[:rows]
        # One rounding of bf16: SGLang's head adds in another order.
        self.unequal += int((np.abs(own - theirs) > 2**-7 * np.abs(own) + 1e-3).sum())

    @property
    def vocab(self):
        return self.model.lm_head.weight.shape[0]

    def prepare(self, struct, given, positions, padding):
        """The forward's metadata, as SGLang's backend makes it from its request table; rows of
        `padding` are of request 0 and write slot 0, as SGLang fills a batch."""
        size, page = struct.batch_size, self.caches.page_size
        stride, rows = struct.page_table_stride, struct.num_rows
        table = self.caches.pages(array(struct.page_table, size * stride).reshape(size, stride))
        requests = torch.from_numpy(array(struct.state_slots, size).astype(np.int64)) + 1
        slots = np.concatenate([array(struct.slots, rows).astype(np.int64) + page, padding])
        of_row = np.concatenate([array(struct.request_idx, rows), padding + size])
        req_to_token = torch.zeros(8, stride * page, dtype=torch.int32)
        places = torch.from_numpy(table[:, :, None] * page + np.arange(page)).reshape(size, -1)
        req_to_token[requests] = places.to(torch.int32)
        if struct.history:
            history = torch.from_numpy(array(struct.history, 3 * size).reshape(size, 3))
            self.model.model.engram_hasher.history[requests] = history
        if len(padding):
            requests = torch.cat([requests, torch.zeros(1, dtype=torch.int64)])
        given.req_pool_indices = requests
        made = BuildPageTablePositions.execute(
            req_to_token=req_to_token,
            req_pool_indices_repeated=requests[torch.from_numpy(of_row).long()],
            seq_lens_casual=positions + 1,
            max_seq_len=stride * page,
            page_size=page,
            swa_window=128,
        )
        # A verify step's graph has them as i32, in which its padding is; other steps as i64.
        out = torch.from_numpy(slots.astype(np.int32) if len(padding) else slots)
        core = SimpleNamespace(page_table=made.page_table, raw_out_loc=out)
        self.backend.forward_metadata = SimpleNamespace(core_attn_metadata=core)


class Replay(replay.Replay):
    """Target steps alone: drafts are injected, for the caches, and not proposed."""

    def draft(self, requests, plain):
        return super().draft([], plain=True)

    def compare_logits(self, parts, counts, mode, wanted, logits):
        super().compare_logits(parts, counts, mode, wanted, logits)
        if self.group.features is None:
            return
        first = 0
        for (request, tokens, _), count in zip(parts, counts, strict=True):
            text = np.concatenate([request.text[: request.done], tokens])
            want = self.oracle(text).features[request.done :]
            got = self.group.features[first : first + count]
            first += count
            error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
            self.feature_errors.extend(error)


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def run(request):
    name, vendor = request.param
    small, built_in = MODELS[name]
    group, weights, own, dtypes = grouped(small)
    config = served.hf_config(_dispatch.built_in(built_in))
    rows = dict.fromkeys(getattr(config, "engram_layer_ids", ()), 50)
    needs = served.table(config, rows).target()

    class Model(served.Model):
        def forward(self, input_ids, positions, forward_batch, input_embeds=None):
            """What SGLang's own forward is here: the plain path over our own caches."""
            self.ran += 1
            group.launch(forward_batch.function, [forward_batch.struct])
            return

    model = Model(needs)
    model.lm_head.weight = torch.nn.Parameter(torch.from_numpy(floats(own["head.weight"])), False)
    model.model.engram_hasher = SimpleNamespace(history=torch.zeros(6, 3, dtype=torch.int32))
    model.config = SimpleNamespace(
        architectures=["DeepseekV4ForCausalLM"], n_routed_experts=small.config["num_experts"]
    )
    tensors = Loaded(own, small.config).all()
    copies = None
    if vendor == "amd":
        tensors = {name: t for name, t in tensors.items() if READ_IN_PLACE.fullmatch(name)}
        copies = {}

    open_kernels = opening(small, tensors, copies)
    backend = served.Backend()
    flags = {"enable_nvidia_megakernel": vendor == "nvidia", "enable_amd_monokernel": copies == {}}
    with pytest.MonkeyPatch.context() as patch, served.server(backend=backend, **flags):
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        caches = Caches(small.config, splits_index=vendor == "amd")
        backend.token_to_kv_pool = caches.pool
        if vendor == "nvidia":
            built = install_nvidia(model, config, open_kernels)
        else:
            patch.setattr(amd_binding, "device_isa", lambda: "gfx950")
            checkpoint = published.tensors(own, dtypes)
            list(amd_binding.monokernel_weights_iterator(model=model, weights=checkpoint))
            copies |= model.__dict__.pop("_mono_copies")
            built = install_amd(model, config, open_kernels, copies)
        engine = Engine(group, model, caches, small.config["hidden"])
        engine.backend = backend
        oracle = make_model(small.config, weights.whole, 1)
        done = Replay(engine, oracle, SEED, small.lengths)
        done.feature_errors = []
        done.run()
    bounds = BOUNDS[name]
    yield SimpleNamespace(
        replay=done,
        built=built,
        model=model,
        bounds=bounds,
        engine=engine,
        tensors=tensors,
        is_amd=vendor == "amd",
    )
    group.close()


def install_nvidia(model, config, open_kernels):
    """As SGLang installs a built target, without its checks of the loaded model."""
    context = SimpleNamespace(
        widths=tuple(range(6, 49, 6)),
        tokens_per_request=6,
        deadline_s=60.0,
        binding=binding.MegakernelBinding(model=model),
    )
    built = build.build_target(model, config, context, open_kernels, build.place(served.ISA))
    dispatch = binding._Dispatch(built=built, original=model.forward, binding=context.binding)
    model.forward = dispatch.wrapped()
    return built


def install_amd(model, config, open_kernels, copies):
    """The same of the AMD contract."""
    widths = tuple(range(6, 49, 6))
    context = BuildContext(isa="gfx950", widths=widths, deadline_s=60.0, copies=copies)
    built = build.build_amd_target(model, config, context, open_kernels, build.place(served.ISA))
    keys = amd_binding._served_keys(mode="target_verify", widths=widths, tokens=6)
    amd_binding._install_forward(model=model, built=built, served=keys, spec=amd.TARGET)
    return built


def test_every_cache_is_written_where_sglang_has_it(run) -> None:
    assert run.engine.differences == []


def test_hidden_states_give_the_models_own_logits(run) -> None:
    assert run.engine.unequal == 0


@pytest.mark.parametrize("run", AS_BOUND, indirect=True)
def test_logits_and_caches_are_the_oracles(run) -> None:
    found = violations(run.replay.kinds, run.bounds)
    assert not found, "\n".join(found)
    assert {"verify", "decode", "prompt", "kv.swa.0", "mtp.0.kv.swa"} <= set(run.replay.kinds)


@pytest.mark.parametrize("run", AS_BOUND, indirect=True)
def test_features_for_the_draft_are_the_oracles(run) -> None:
    assert len(run.replay.feature_errors) == 30
    assert np.median(run.replay.feature_errors) <= nvidia.LOGITS_MEDIAN_REL


def test_covered_and_uncovered_steps_came_in_turn(run) -> None:
    assert run.engine.covered_rows == [(12, 0), (12, 0), (6, 6)]
    report = run.built.report()
    assert report["covered"] == 3
    # Where SGLang itself decides, we are not asked about the others.
    ours = {} if run.is_amd else {"step_is_extend": 3, "mode_not_captured": 2}
    assert report["uncovered_by_reason"] == ours
    assert run.model.ran == 5


def test_what_is_not_relaid_is_bound_where_it_lies(run) -> None:
    """Scales of blocks are re-laid, and of V4 its compressors' gains and biases; nothing large. On
    AMD everything is a copy but the tables that rows are taken from."""
    kernels = run.built.kernels
    theirs = {
        (tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for tensor in run.tensors.values()
    }

    def in_place(tensor):
        place = tensor.data_ptr()
        return any(first <= place < first + size for first, size in theirs)

    copies = {name for name, tensor in kernels.bound.items() if not in_place(tensor)}
    if run.is_amd:
        tables = {name for name in kernels.bound if IN_PLACE.fullmatch(name)}
        assert set(kernels.bound) - copies <= tables and "embed.weight" not in copies
        return
    small = (".scale", "compressor.ape", "compressor.norm.weight")
    assert copies and all(name.endswith(small) for name in copies), sorted(copies)
    assert not any("experts." in name and "shared" not in name for name in copies)
    relaid = sum(copy.numel() * copy.element_size() for copy in kernels.relaid)
    whole = sum(tensor.numel() * tensor.element_size() for tensor in run.tensors.values())
    assert 0 < relaid < 0.01 * whole
    assert kernels.own_bytes == kernels.model.own_bytes + relaid


def test_the_spec_declares_the_bound_that_is_held() -> None:
    declared = nvidia.TARGET.numerics.tolerances
    assert declared["logits.median_rel"] == max(b.median["logits"] for b in BOUNDS.values())
    # Held on a GPU, where SGLang's own forward runs: tests/gpu/sglang/engine.py.
    assert declared["logits.median_rel_of_sglang"] == LOGITS_MEDIAN_REL_OF_SGLANG


def test_v4s_output_projection_in_bf16_takes_the_attentions_output_in_bf16() -> None:
    """As SGLang loads it on Hopper unless it is told to keep it in fp8. Two texts' first steps, so
    that everything is the kernels' own."""
    small, built_in = MODELS["v4-deep"]
    group, weights, own, _ = grouped(small)
    group.close()
    size, page, rows = 2, small.config["page_size"], 6
    request = build.Request(
        model=None,
        config_json=_dispatch.built_in(built_in),
        mode="target_verify",
        tokens_per_request=rows,
        widths=(rows, size * rows),
        tensors=Loaded(own, small.config, is_wide=True).all(),
        tp_rank=0,
        tp_size=1,
        wait_budget_ns=1_000_000_000,
        page_size=page,
        expert_layout="marlin",
        device=0,
    )
    kernels = type("Kernels", (Small,), {"small": small})(request, SCALAR)
    kernels.connect([kernels.export()])
    ids = torch.from_numpy(np.random.default_rng(SEED).integers(0, 90, (size, rows)))
    positions, pages = torch.arange(rows).repeat(size), 1 + torch.arange(size)
    core = SimpleNamespace(
        page_table=pages.int().repeat_interleave(rows)[:, None].contiguous(),
        raw_out_loc=pages.repeat_interleave(rows) * page + positions,
    )
    with served.server():
        pool = Caches(small.config).pool
    metadata = SimpleNamespace(core_attn_metadata=core)
    view = View(SimpleNamespace(forward_metadata=metadata, token_to_kv_pool=pool))
    step = SimpleNamespace(mode="target_verify", rows=size * rows, view=view)
    out = kernels.step(step, ids.flatten(), positions, SimpleNamespace(req_pool_indices=pages))
    got = out.aux_hidden.float().numpy()

    def apart(oracle):
        want = np.concatenate([oracle.run(text.numpy()).features for text in ids])
        return np.median(np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1))

    quantises, plain = (make_model(small.config, weights.whole, 1) for _ in range(2))
    plain.target_group_outputs = plain.group_outputs
    assert apart(plain) <= nvidia.LOGITS_MEDIAN_REL
    assert apart(plain) < 0.5 * apart(quantises)
