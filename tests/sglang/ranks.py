"""One of two real ranks (gloo, CPU): installs our builds through SGLang, case after case, and
prints as JSON what became of each.

    python ranks.py FOLDER RANK RANKS

Every case is one that can go wrong in a way that leaves a peer waiting.
"""

import datetime
import json
import sys
from types import SimpleNamespace

import drafting
import published
import served
import torch
import torch.distributed as dist
from lowlat import _dispatch, guard
from sglang.kernels.plugin_kernels.amd import spec as amd_contract
from sglang.kernels.plugin_kernels.nvidia import spec as contract
from sglang.srt.kernel_plugins.amd import binding as amd_binding
from sglang.srt.kernel_plugins.nvidia import binding

# A peer that waits longer than this is a failure, not a slow machine.
GROUP_BUDGET_S = 120
ARCHITECTURE = "LowlatTestForCausalLM"


class Differs(served.Kernels):
    """Of another build of the kernels."""

    catalogue_digest = 8


class OtherNumerics(served.Kernels):
    numerics = "looser"


def fails(request):
    raise RuntimeError("device lost")


def cases(rank):
    """Name: the spec of this rank, and what it does to its loaded model."""
    ours = served.Kernels
    alone = rank == 1
    narrow = served.spec(ours, max_rows=12 if alone else 48)
    return {
        "agree": (served.spec(ours), None),
        "one build fails": (served.spec(fails if alone else ours), None),
        "other kernels": (served.spec(Differs if alone else ours), None),
        "other numerics": (served.spec(OtherNumerics if alone else ours), None),
        "other widths": (narrow, None),
        "one model differs": (served.spec(ours), spoil if alone else None),
        "one rank has no spec": (None if alone else served.spec(ours), None),
    }


def spoil(model):
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.float(), False)


def run(rank, group, spec, change):
    config = served.hf_config(_dispatch.built_in("tiny-v41"))
    config.architectures = [ARCHITECTURE]
    contract._REGISTRY.pop(ARCHITECTURE, None)
    if spec is not None:
        sys.modules["lowlat_test_spec"] = SimpleNamespace(SPEC=spec)
        contract._REGISTRY[ARCHITECTURE] = "lowlat_test_spec:SPEC"
    rows = {idx: 50 + idx + rank for idx in config.engram_layer_ids}
    model = served.Model(served.table(config, rows, tp_size=2).target())
    if change is not None:
        change(model)
    with served.server(group=group):
        try:
            binding.install_megakernel(
                model=model, hf_config=config, capture_tail_hooks=[], is_draft=False
            )
        except (ValueError, RuntimeError) as error:
            return {"refused": str(error)}
        built = binding.built_megakernel(model)
        model.forward(torch.arange(6), torch.arange(6), served.batch("TARGET_VERIFY", 1))
        return {"widths": built.widths, "covered": built.report()["covered"]}


def amd_cases(rank):
    """Of the AMD contract, name: the kernels of this rank, and a tensor that it never sees."""
    alone, ours = rank == 1, served.Kernels
    return {
        "amd: agree": (ours, None),
        "amd: one build fails": (fails if alone else ours, None),
        "amd: other kernels": (Differs if alone else ours, None),
        "amd: one rank lacks a tensor": (ours, "layers.0.attn.q_norm.weight" if alone else None),
    }


def run_amd(group, open_kernels, lacks):
    config = served.hf_config(_dispatch.built_in("tiny-v41"))
    config.architectures = [ARCHITECTURE]
    spec = published.spec_of(open_kernels)
    sys.modules["lowlat_test_spec"] = SimpleNamespace(SPEC=spec)
    registry = amd_contract._REGISTRY.setdefault(amd_contract.BACKEND, {})
    registry[ARCHITECTURE] = "lowlat_test_spec:SPEC"
    model = published.Loaded(config, tp_size=2)
    weights = [
        (name, tensor) for name, tensor in published.checkpoint_of(config)[0] if name != lacks
    ]
    flags = {"enable_nvidia_megakernel": False, "enable_amd_monokernel": True}
    with served.server(group=group, **flags):
        list(amd_binding.monokernel_weights_iterator(model=model, weights=weights))
        try:
            amd_binding.install_monokernel_forward(
                model=model, hf_config=config, capture_tail_hooks=[]
            )
        except (ValueError, RuntimeError) as error:
            return {"refused": str(error)}
        given = served.batch("TARGET_VERIFY", 1)
        given.input_ids = torch.arange(6)
        model.forward(torch.arange(6), torch.arange(6), given)
        (built,) = spec.build.built
        return {"widths": built.kernels.request.widths, "covered": built.report()["covered"]}


def drafts(group):
    """Proposals of our sampler, at several temperatures."""
    ours, _ = drafting.samplers(group, kernels=drafting.Operations)
    return [drafting.propose(ours, 4, seed, [0.0, 0.5, 1.0, 2.0]).tolist() for seed in range(3)]


def main():
    folder, rank, tp_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    binding.device_isa = lambda: served.ISA
    amd_binding.device_isa = lambda: "gfx950"
    guard.kernels_reasons = lambda *_: []
    properties = SimpleNamespace(multi_processor_count=256)
    torch.cuda.memory_allocated = lambda: 0
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_properties = lambda device: properties
    torch.cuda.mem_get_info = lambda: (1 << 30, 1 << 30)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=tp_size,
        timeout=datetime.timedelta(seconds=GROUP_BUDGET_S),
    )
    group = SimpleNamespace(world_size=tp_size, rank_in_group=rank, cpu_group=dist.group.WORLD)
    told = {name: run(rank, group, *case) for name, case in cases(rank).items()}
    told |= {name: run_amd(group, *case) for name, case in amd_cases(rank).items()}
    told["drafts"] = drafts(group)
    print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
