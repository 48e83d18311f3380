"""Makes SGLang's own DeepSeek-V4 classes on the meta device and says how their tensors differ from
the plugin's table; as JSON.

    python real_models.py FOLDER RANK RANKS
"""

import copy
import json
import re
import sys
from pathlib import Path

import sglang.srt.layers.rotary_embedding.base as rotary
import sglang.srt.layers.rotary_embedding.rope_variant as rotary_variant
import torch
from lowlat import _dispatch, guard
from served import server_args
from sglang.srt import runtime_context
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.distributed.device_communicators import pynccl
from sglang.srt.distributed.parallel_state import set_custom_all_reduce
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark

# Layers of every kind, few enough to make quickly.
FEWER = {
    "v4-flash": dict(
        num_hidden_layers=6,
        compress_ratios=[0, 0, 4, 128, 4, 128, 0, 0, 0],
        dspark_target_layer_ids=[3, 4, 5],
    ),
    "v41-flash": dict(
        num_hidden_layers=7,
        compress_ratios=[0, 0, 2, 2, 1, 1, 1, 0, 0, 0],
        kv_source_layer_ids=[2, 4],
        index_source_layer_ids=[2, 4, 6],
        candidate_source_layer_id=4,
        engram_layer_ids=[1],
        engram_num_embeddings=[384006168],
        # The tokenizer below maps every token to itself.
        engram_compressed_vocab_size=129280,
        dspark_target_layer_ids=[4, 5, 6],
    ),
}
MARLIN = re.compile(r"^(.*\.mlp\.experts)\.(w13|w2)_weight$")


def checkpoint(name, folder):
    """A folder with the configuration and a tokenizer, which the Engram hash asks for."""
    config = json.loads(_dispatch.built_in(name)) | FEWER[name]
    (folder / "config.json").write_text(json.dumps(config))
    from tokenizers import Tokenizer, models

    words = {f"w{idx}": idx for idx in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def process(args, hf_config, folder, rank, tp_size):
    """The state of a scheduler process of one rank."""
    ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank)
    runtime_context.publish(args, role="scheduler", hf_config=hf_config, ranks=ranks)
    # The groups only say who is who here; their GPU communicators would look for GPUs.
    pynccl.PyNcclCommunicator = lambda **_: None
    set_custom_all_reduce(False)
    init_distributed_environment(
        world_size=tp_size,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"file://{folder}/meet",
    )
    initialize_model_parallel(backend="gloo")
    initialize_moe_config()
    # Rotary tables look for a device of their own.
    rotary._is_cpu = True
    rotary_variant.get_device = lambda *_: "cpu"
    torch.set_default_dtype(torch.bfloat16)


def prepare(model, needs):
    """As ``prepare_moe_mxfp4_layer_for_marlin`` and V4's output projection leave their weights on
    sm_90: the codes in tiles of 16, scales beside them, and a scale with a dimension a group."""
    shapes = {need.name: need.shape for need in needs}
    modules = dict(model.named_modules())

    def replace(name, dtype):
        owner, _, last = name.rpartition(".")
        tensor = torch.empty(shapes[name], dtype=dtype, device="meta")
        setattr(modules[owner], last, torch.nn.Parameter(tensor, False))

    for name in list(dict(model.named_parameters())):
        if MARLIN.match(name):
            replace(name, torch.int32)
            replace(f"{name}_scale", torch.float8_e8m0fnu)
        elif name.endswith("wo_a.weight_scale_inv"):
            replace(name, torch.float32)


def unread(model, needs):
    """Parameters of the layers that the table has not, without their layer's name."""
    read = {need.name for need in needs} | {
        # The loader's own scales, which the preparation deletes.
        need.name.replace("_scale", "_scale_inv")
        for need in needs
        if ".experts." in need.name
    }
    names = (name for name, _ in model.named_parameters() if name not in read)
    layers = (re.fullmatch(r"(?:model\.layers|stages)\.\d+\.(.*)", name) for name in names)
    return sorted({found[1] for found in layers if found})


def main():
    folder, rank, tp_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    args = server_args(folder, tp_size=tp_size, enable_nvidia_megakernel=False)
    args.resolve_once()
    model_config = model_config_of(args)
    hf_config = model_config.hf_config
    process(args, hf_config, folder, rank, tp_size)
    quantisation = Fp8Config.from_config(hf_config.quantization_config)
    quantisation.is_fp4_experts = model_config.is_fp4_experts
    quantisation.is_dsv4_fp4_experts = True
    with torch.device("meta"):
        target = DeepseekV4ForCausalLM(config=hf_config, quant_config=quantisation)
        draft_config = copy.deepcopy(hf_config)
        draft_config.architectures = ["DeepseekV4ForCausalLMDSpark"]
        draft = DeepseekV4ForCausalLMDSpark(config=draft_config, quant_config=quantisation)
    needs = guard.target_needs(target, hf_config)
    unprepared = guard.loaded_reasons(target, needs)
    draft_needs = guard.table(draft_config, {}).draft(stages=True)
    prepare(target, needs)
    prepare(draft, draft_needs)
    told = {
        "unprepared": unprepared,
        "target": guard.loaded_reasons(target, needs),
        "draft": guard.loaded_reasons(draft, draft_needs),
        "unread": unread(target, needs),
        "unread_draft": unread(draft, draft_needs),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
