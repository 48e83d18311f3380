"""A server's arguments, a small model as SGLang would have loaded it, and kernels that stand in."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lowlat import build, guard
from lowlat.replay import StepOutput
from sglang.kernels.plugin_kernels.nvidia.spec import (
    MegakernelSpec,
    Numerics,
    NumericsKind,
    Requirements,
)
from sglang.srt.layers.quantization.mxfp4_marlin_moe import Mxfp4MarlinMoEMethod
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs

ISA = "scalar"
GAMMA = 5
ROWS = GAMMA + 1
TORCH = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "ue8m0": torch.float8_e8m0fnu,
    "i32": torch.int32,
}


def server_args(model, **more):
    """A server's arguments as `launch_server` takes them, not yet resolved."""
    settings = dict(
        device="cuda",
        tp_size=4,
        load_format="dummy",
        skip_tokenizer_init=True,
        context_length=131072,
        moe_runner_backend="marlin",
        speculative_algorithm="DSPARK",
        speculative_dspark_block_size=5,
        enable_nvidia_megakernel=True,
    )
    return ServerArgs(model_path=str(model), **settings | more)


def resolve(model, **more):
    """SGLang's whole resolution of a server's arguments, as its launcher runs it."""
    args = server_args(model, **more)
    args.resolve_once()
    return args


NVIDIA_FLAG, AMD_FLAG = "--enable-nvidia-megakernel", "--enable-amd-monokernel"
# What an AMD server is started with in place of the NVIDIA one's.
AMD_ARGS = dict(
    enable_nvidia_megakernel=False, enable_amd_monokernel=True, moe_runner_backend="auto"
)


def refusal(model, *, flag=NVIDIA_FLAG, **more):
    """The lines of the refusal that resolution ends in."""
    with pytest.raises(ValueError, match=f"{flag} cannot run this setup") as told:
        resolve(model, **more)
    head, *lines = str(told.value).split("\n  - ")
    assert head.endswith(":")
    return lines


def ranks(program, folder, count, budget_s):
    """What each of `count` processes of a program in this folder prints as its last line of JSON.
    A program takes FOLDER RANK RANKS."""
    path = Path(__file__).with_name(program)
    running = [
        subprocess.Popen(
            [sys.executable, str(path), str(folder), str(rank), str(count)],
            env=os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        answers = [process.communicate(timeout=budget_s) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, answers, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in answers]


# ------------------------------------------------------------------ a loaded model


class Config(SimpleNamespace):
    """A model's configuration with its published fields, as SGLang's classes have them."""

    def to_dict(self):
        return dict(vars(self))


def hf_config(text):
    fields = json.loads(text)
    rope = fields.pop("rope_scaling") | {"rope_theta": fields.pop("rope_theta")}
    return Config(**fields, rope_parameters=rope)


class LogitsProcessor(torch.nn.Module):
    """Called as SGLang's is, and keeps what it was given."""

    def forward(self, input_ids, hidden, lm_head, metadata, aux=None, **more):
        self.given = SimpleNamespace(
            input_ids=input_ids, hidden=hidden, metadata=metadata, aux=aux, **more
        )
        return hidden.float() @ lm_head.weight.float().T


class Model(torch.nn.Module):
    """Holds exactly the tensors of a table of needs, and a forward that says it ran."""

    def __init__(self, needs):
        super().__init__()
        for need in needs:
            *path, last = need.name.split(".")
            owner = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner._modules[part]
            tensor = torch.zeros(need.shape, dtype=TORCH[need.dtype])
            owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
            if need.layout == "marlin":
                owner.quant_method = Mxfp4MarlinMoEMethod(None, "")
        self.logits_processor = LogitsProcessor()
        for name, module in self.named_modules():
            if name.endswith("engram.embed"):
                module.rows = module.weight.shape[0]
        if "model" in self._modules:
            layers = self.model._modules["layers"]._modules
            self.model.layers = torch.nn.ModuleList(layers[str(i)] for i in range(len(layers)))
        self.ran = 0

    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        self.ran += 1
        return "SGLang's own"


class Kernels:
    """Kernels that stand in: hidden states that say which row they are of."""

    own_bytes = 3 << 20
    catalogue_digest = 7
    shape = "tiny"
    numerics = "none"
    layout = "none"

    def __init__(self, request):
        self.request = request
        self.steps = []

    def export(self):
        return b"handle"

    def connect(self, handles):
        assert handles == [b"handle"] * self.request.tp_size

    def attach(self, head):
        pass

    def reads(self, view):
        pool = view.kv_pool
        return {"swa.0": pool.get_swa_key_buffer_radix(0)}

    def step(self, step, input_ids, positions, forward_batch):
        self.steps.append(step)
        width = self.request.model.lm_head.weight.shape[1]
        hidden = input_ids[:, None].float().expand(-1, width).to(torch.bfloat16)
        return StepOutput(hidden, before_norm=hidden * 2)

    def draft_layers(self, step, input_ids, positions, forward_batch):
        self.steps.append(step)
        return input_ids[:, None].to(torch.bfloat16)


class Backend:
    """An attention backend as a forward view reads it."""

    decode_attention_backend_str = "dsv4"

    def __init__(self):
        self.forward_metadata = SimpleNamespace()
        self.token_to_kv_pool = Pool()


class Pool:
    def __init__(self):
        self.swa = torch.zeros(4, 64, dtype=torch.uint8)

    def get_swa_key_buffer_radix(self, layer):
        return self.swa


def batch(mode, size):
    return SimpleNamespace(forward_mode=ForwardMode[mode], batch_size=size)


def widths(tp_size):
    """All of the topology's widths that follow from one tensor-parallel group."""
    return dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), tp_size)


def table(config, rows=None, tp_size=1, wide=False):
    with get_parallel().override(**widths(tp_size)):
        return guard.table(config, {} if rows is None else rows, wide)


def spec(open_kernels, *, make=build.build_target, reasons=guard.target_reasons, **more):
    """A spec for tests: ours in everything but the kernels behind it and the machine code."""
    fields = dict(
        name="lowlat-test",
        requires=Requirements(isas=frozenset({ISA}), tp_sizes=frozenset({1, 2})),
        features=frozenset(),
        numerics=Numerics(NumericsKind.BITWISE),
        max_rows=48,
        build=lambda model, config, context: make(
            model, config, context, open_kernels, build.place(ISA)
        ),
        api_version=1,
        model_disable_reasons=reasons,
    )
    return MegakernelSpec(**fields | more)


@contextlib.contextmanager
def server(*, group=None, backend=None, capture_bs=(1, 2, 4), draft=True, **more):
    """A scheduler's published settings, of `group` ranks, with an attention backend active."""
    phase = PhaseConfig(backend="full", bs=list(capture_bs))
    fields = dict(
        enable_nvidia_megakernel=True,
        cuda_graph_config=CudaGraphConfig(decode=phase),
        speculative_algorithm="DSPARK" if draft else None,
        speculative_num_draft_tokens=ROWS if draft else None,
    )
    group = group or SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)
    backend = backend or Backend()
    with (
        get_context().override_server_args(**fields | more),
        get_parallel().override(tp_group=group, **widths(group.world_size)),
        forward_context(ForwardContext(attn_backend=backend)),
    ):
        yield backend
