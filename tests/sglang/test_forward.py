"""A small model through SGLang's dispatch, with the scalar kernels behind it: logits and caches of
covered and uncovered steps in turn, beside the dense float64 computation of ``oracle.model``.

The kernels' own head is a unit matrix here, so that what comes out of them are the hidden states
after the last norm, as a megakernel gives them, and the head is the module that SGLang would call.
"""

import ctypes as ct
from types import SimpleNamespace

import numpy as np
import pytest
import served
import torch
from lowlat import _dispatch, build
from lowlat.replay import StepOutput
from lowlat.specs import nvidia
from oracle.formats import bf16_bits
from oracle.models import make_model
from support import kernels_abi as abi
from support import replay, small_model
from test_whole_model import BOUNDS, violations

SEED = 11
# Of V4.1's small models; the unit head needs a vocabulary of this size, which they have.
HIDDEN = 96
MODES = {abi.DECODE: "DECODE", abi.VERIFY: "TARGET_VERIFY", abi.EXTEND: "EXTEND"}


def floats(bits):
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


class Scalar(served.Kernels):
    """The scalar kernels by their C ABI, over caches that belong to the engine."""

    def __init__(self, request, group):
        super().__init__(request)
        self.group = group
        self.own_bytes = group.lib.lowlat_model_own_bytes(group.models[0])

    def reads(self, view):
        return view.kv_pool.pool.buffers

    def step(self, step, input_ids, positions, forward_batch):
        struct = forward_batch.struct
        self.steps.append(step)
        assert step.rows == struct.num_rows == len(positions)
        return StepOutput(hidden_states(self.group, struct, self.group.lib.lowlat_step_launch))


def hidden_states(group, struct, launch):
    """Launches the step and gives its hidden states, the logits of the unit head."""
    hidden = np.full((struct.num_logit_rows, HIDDEN), np.nan, np.float32)
    struct.logits = hidden.ctypes.data
    struct.argmax = None
    group.launch(launch, [struct])
    return torch.from_numpy(hidden)


class Engine:
    """A group of one rank whose target's steps go through the model that SGLang installed on."""

    def __init__(self, group, model):
        self.group, self.model = group, model
        self.lib, self.models, self.pools = group.lib, group.models, group.pools
        self.must = group.must

    def launch(self, function, structs):
        (struct,) = structs
        if not isinstance(struct, abi.Step):
            self.group.launch(function, structs)
            return
        out_logits, out_argmax = struct.logits, struct.argmax
        given = served.batch(MODES[struct.mode], struct.batch_size)
        given.struct = struct
        rows = torch.arange(struct.num_rows)
        logits = self.model.forward(rows, rows, given).numpy()
        # The published rounding of logits, as the kernels' own head has it.
        logits = floats(bf16_bits(logits))
        ct.memmove(out_logits, np.ascontiguousarray(logits).ctypes.data, logits.nbytes)
        picks = logits.argmax(1).astype(np.int32)
        ct.memmove(out_argmax, picks.ctypes.data, picks.nbytes)


class Replay(replay.Replay):
    """Target steps alone: drafts are injected, for the caches, and not proposed."""

    def draft(self, requests, plain):
        return super().draft([], plain=True)


@pytest.fixture(scope="module", params=["short", "deep"])
def run(request):
    path = abi.find_library()
    if path is None:
        pytest.skip("no kernel library: set LOWLAT_KERNELS or install the package")
    weights = small_model.Weights(small_model.MODELS[request.param], SEED, 1)
    heads = {}

    def shard(spec, rank):
        value = weights.shard(spec, rank)
        if spec.name == b"head.weight":
            heads["true"] = value
            return bf16_bits(np.eye(*value.shape, dtype=np.float32))
        return value

    group = abi.Group(path, weights.small.config, 1, shard)
    group.lib.lowlat_model_own_bytes.restype = ct.c_uint64
    config = served.hf_config(_dispatch.built_in("tiny-v41"))
    rows = dict.fromkeys(config.engram_layer_ids, 50)
    needs = served.table(config, rows).target()

    class Model(served.Model):
        def forward(self, input_ids, positions, forward_batch, input_embeds=None):
            """What SGLang's own forward is here: the plain path over the same caches."""
            self.ran += 1
            hidden = hidden_states(group, forward_batch.struct, group.lib.lowlat_plain_step_launch)
            return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    model = Model(needs)
    model.lm_head.weight = torch.nn.Parameter(torch.from_numpy(floats(heads["true"])), False)
    backend = served.Backend()
    backend.token_to_kv_pool.buffers = {
        name: torch.from_numpy(pool) for name, pool in group.pools[0].items()
    }
    context = SimpleNamespace(
        widths=tuple(range(6, 49, 6)), tokens_per_request=6, deadline_s=60.0, binding=None
    )
    with pytest.MonkeyPatch.context() as patch, served.server(backend=backend):
        from sglang.srt.kernel_plugins.nvidia import binding

        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        place = build.place(served.ISA)
        context.binding = binding.MegakernelBinding(model=model)
        built = build.build_target(
            model, config, context, lambda request: Scalar(request, group), place
        )
        dispatch = binding._Dispatch(built=built, original=model.forward, binding=context.binding)
        model.forward = dispatch.wrapped()
        oracle = make_model(weights.small.config, weights.whole, 1)
        done = Replay(Engine(group, model), oracle, SEED, weights.small.lengths)
        done.run()
    bounds = BOUNDS[request.param]
    yield SimpleNamespace(replay=done, built=built, model=model, bounds=bounds)
    group.close()


def test_logits_and_caches_are_the_oracles(run) -> None:
    found = violations(run.replay.kinds, run.bounds)
    assert not found, "\n".join(found)
    assert {"verify", "decode", "prompt", "kv.swa.0", "mtp.0.kv.swa"} <= set(run.replay.kinds)


def test_covered_and_uncovered_steps_came_in_turn(run) -> None:
    report = run.built.report()
    assert [step.rows for step in run.built.kernels.steps] == [12, 12, 6]
    assert report["covered"] == 3
    assert report["uncovered_by_reason"] == {"step_is_extend": 3, "mode_not_captured": 2}
    assert run.model.ran == 5


def test_the_spec_declares_the_bound_that_is_held() -> None:
    declared = nvidia.TARGET.numerics.tolerances
    assert declared == {"logits.median_rel": max(b.median["logits"] for b in BOUNDS.values())}
