"""A checkpoint's tensors as SGLang's loader reads them, from arrays by the kernels' names; and what
an AMD server needs beside them: a model that loads, and a spec of ours.
"""

from types import SimpleNamespace

import numpy as np
import served
import torch
from lowlat import build, guard
from lowlat.specs import amd as specs
from sglang.kernels.plugin_kernels.amd import spec as contract

# By the kernels' dtype: how the published file has it.
FILE = {
    "bf16": (np.int16, torch.bfloat16),
    "e4m3": (np.uint8, torch.float8_e4m3fn),
    "ue8m0": (np.uint8, torch.float8_e8m0fnu),
    "fp4x2": (np.int8, torch.int8),
    "f32": (np.float32, torch.float32),
}


def tensors(arrays, dtypes):
    """(name, tensor) of every array; experts one by one, and their numbers in 64 bits. `dtypes` are
    the kernels' by name."""
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        if dtypes[name] in ("i32", "i64"):
            yield name, torch.from_numpy(array.astype(np.int64))
            continue
        bits, dtype = FILE[dtypes[name]]
        tensor = torch.from_numpy(array.view(bits)).view(dtype)
        owner, mark, last = name.partition(".experts.")
        if not mark or owner.endswith("shared"):
            yield name, tensor
            continue
        for expert in range(len(tensor)):
            yield f"{owner}.experts.{expert}.{last}", tensor[expert]


def random_arrays(specs, num_experts, seed=0):
    """Whole tensors of `specs`, ``HostedModel.tensors()`` of one rank of one."""
    generator = np.random.default_rng(seed)
    arrays = {}
    for spec in specs:
        if spec["pool"]:
            continue
        shape, dtype = spec["shape"], spec["dtype"]
        if dtype in ("i32", "i64"):
            arrays[spec["name"]] = generator.integers(0, num_experts, shape, np.int32)
        elif dtype == "f32":
            arrays[spec["name"]] = generator.standard_normal(shape).astype(np.float32)
        else:
            bits = FILE[dtype][0]
            arrays[spec["name"]] = generator.integers(0, 100, shape).astype(bits)
    return arrays


def raw(tensor):
    """A tensor's bits."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(bits[tensor.element_size()]).numpy()


# ------------------------------------------------------------------ an AMD server


def tp(tp_size, rank=0):
    """A published topology."""
    group = SimpleNamespace(world_size=tp_size, rank_in_group=rank, cpu_group=None)
    return served.get_parallel().override(tp_group=group, **served.widths(tp_size))


def tensors_of(config, tp_size=1, draft=False):
    """What a rank's kernels read of a checkpoint."""
    with tp(tp_size):
        return guard.kernel_tensors(config, draft)


def checkpoint_of(config, draft=False):
    """Its published tensors and the arrays behind them, whole."""
    wanted = tensors_of(config, draft=draft)
    arrays = random_arrays(wanted, config.n_routed_experts)
    dtypes = {spec["name"]: spec["dtype"] for spec in wanted}
    return list(tensors(arrays, dtypes)), arrays


class Loaded(served.Model):
    """A model that SGLang loads: its own tensors are the kernels' business where they are read in
    place."""

    def __init__(self, config, tp_size=1):
        rows = {idx: 50 + idx for idx in getattr(config, "engram_layer_ids", ())}
        super().__init__(served.table(config, rows, tp_size).target())
        self.config = config


class LoadedDraft(served.Model):
    """A draft likewise, to which SGLang has attached nothing yet."""

    sample_from_anchor = True

    def __init__(self, config):
        super().__init__(served.table(config).draft())
        self.config = config
        self.embed_tokens = self.lm_head = None


def spec_of(open_kernels, draft=False, **more):
    """Ours in everything but the kernels behind it and what the small models' sizes are."""
    ours = specs.DRAFT if draft else specs.TARGET
    builds = build.build_amd_draft if draft else build.build_amd_target
    fields = {name: getattr(ours, name) for name in contract.MonoSpec.__struct_fields__}
    widths = ours.widths("gfx950")
    limits = contract.DeviceLimits(widths=widths, tp_sizes=(1,), resident_blocks=256)
    built = []

    def make(model, config, context):
        built.append(builds(model, config, context, open_kernels, build.place(served.ISA)))
        return built[-1]

    fields |= dict(name="lowlat-test", devices={"gfx950": limits}, build=make)
    make.built = built
    return contract.MonoSpec(**fields | more)
