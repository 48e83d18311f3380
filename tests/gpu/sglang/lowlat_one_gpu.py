"""The plugin's specs for a test on one GPU: a model of any number of layers, no tensor parallelism.
Everything else, the kernels above all, is the plugin's own.
"""

from typing import Any

from lowlat import build, guard
from lowlat.specs import nvidia
from msgspec.structs import replace
from sglang.kernels.plugin_kernels.nvidia.spec import register

# What a shorter model on one GPU is refused for: tp_size, and fields of the model.
REFUSED = ("[102]", "[104]")
# The scalar kernels' requirements ask for no sizes.
PLACE = "scalar"


def few_layers(cfg: Any, hf_config: Any) -> list[str]:
    reasons = guard.config_disable_reasons(cfg, hf_config)
    return [line for line in reasons if not line.startswith(REFUSED)]


def target(model: Any, hf_config: Any, context: Any) -> Any:
    where = build.place(PLACE)
    return build.build_target(model, hf_config, context, build.nvidia_kernels, where)


def draft(model: Any, hf_config: Any, context: Any) -> Any:
    where = build.place(PLACE)
    return build.build_draft(model, hf_config, context, build.nvidia_kernels, where)


REQUIRES = replace(nvidia.requirements(), tp_sizes=frozenset({1}), hf_config={})
TARGET = replace(nvidia.TARGET, requires=REQUIRES, build=target, config_disable_reasons=few_layers)
DRAFT = replace(nvidia.DRAFT, requires=REQUIRES, build=draft)


def register_nvidia() -> None:
    """The entry point ``nvidia_megakernel``, in the place of the plugin's."""
    register(architecture="DeepseekV4ForCausalLM", path="lowlat_one_gpu:TARGET")
    register(architecture="DeepseekV4ForCausalLMDSpark", path="lowlat_one_gpu:DRAFT")
