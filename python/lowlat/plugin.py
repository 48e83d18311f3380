"""Entry points of SGLang's plugin loader. Each registers the paths of its specs as strings; a spec
and everything behind it are imported when SGLang looks the spec up, which it does only with
``--enable-nvidia-megakernel`` or ``--enable-amd-monokernel``.
"""

import logging

TARGET, DRAFT = "DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMDSpark"
# The architectures that SGLang gives to the target and to its DSpark draft, of V4 and V4.1 alike.
SPECS = {TARGET: "lowlat.specs.nvidia:TARGET", DRAFT: "lowlat.specs.nvidia:DRAFT"}
AMD_SPECS = {TARGET: "lowlat.specs.amd:TARGET", DRAFT: "lowlat.specs.amd:DRAFT"}


def register_nvidia() -> None:
    """The entry point ``nvidia_megakernel``."""
    try:
        from sglang.kernels.plugin_kernels.nvidia.spec import register
    except ImportError:
        tell_no_contract()
        return
    for architecture, path in SPECS.items():
        register(architecture=architecture, path=path)


def register_amd() -> None:
    """The entry point ``amd_monokernel``."""
    try:
        from sglang.kernels.plugin_kernels.amd.spec import BACKEND, register
    except ImportError:
        tell_no_contract()
        return
    for architecture, path in AMD_SPECS.items():
        register(backend=BACKEND, architecture=architecture, path=path)


def tell_no_contract() -> None:
    """A release before the contract loads plugins too, in every process and without the flag."""
    logging.getLogger(__name__).info(
        "this SGLang has no kernel-plugin contract, so lowlat registers nothing"
    )
