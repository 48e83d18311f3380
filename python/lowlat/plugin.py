"""Entry points of SGLang's plugin loader. Each registers the path of a spec as a string; the spec
and everything behind it are imported when SGLang looks the spec up, which it does only with
``--enable-nvidia-megakernel``.
"""

import logging

# The architectures that SGLang gives to the target and to its DSpark draft, of V4 and V4.1 alike.
SPECS = {
    "DeepseekV4ForCausalLM": "lowlat.specs.nvidia:TARGET",
    "DeepseekV4ForCausalLMDSpark": "lowlat.specs.nvidia:DRAFT",
}


def register_nvidia() -> None:
    """The entry point ``nvidia_megakernel``."""
    try:
        from sglang.kernels.plugin_kernels.nvidia.spec import register
    except ImportError:
        # A release before the contract loads plugins too, in every process and without the flag.
        logging.getLogger(__name__).info(
            "this SGLang has no kernel-plugin contract, so lowlat registers nothing"
        )
        return
    for architecture, path in SPECS.items():
        register(architecture=architecture, path=path)
