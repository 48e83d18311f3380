"""Takes a wait for the GPU out of every drafted step, by SGLang's registry of hooks.

SGLang lists a draft block's attention data anew before each replay of its graph, and asks the GPU
for the requests' lengths to do so: the host stands still until the step before has ended, and only
then launches those small kernels, the draft and the next step. Nothing on a GPU reads the numbers
that it waits for. With numbers on the host there is no wait, and SGLang replays the listing as a
graph, which it tries by itself and gives up because of that question.
"""

import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

DRAFT_LISTING = (
    "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"
    ".init_forward_metadata_dspark_draft_block"
)
LENGTHS, HOST_LENGTHS = "seq_lens", "seq_lens_cpu"


@functools.cache
def install() -> None:
    """Once a process, by a draft's build: a server without the plugin's flag builds none. Where the
    method takes other arguments, or another plugin was first, the wait stays."""
    from sglang.srt.plugins import hook_registry

    try:
        taken = inspect.signature(pkgutil.resolve_name(DRAFT_LISTING)).parameters
    except (ImportError, AttributeError) as error:
        logger.warning("lowlat: each draft waits for the GPU: %s", error)
        return
    if not {LENGTHS, HOST_LENGTHS} <= taken.keys():
        words = "lowlat: each draft waits for the GPU: %s takes %s; needed %s and %s"
        logger.warning(words, DRAFT_LISTING, ", ".join(taken), LENGTHS, HOST_LENGTHS)
        return
    registry = hook_registry.HookRegistry
    before = pkgutil.resolve_name(DRAFT_LISTING)
    source = hook_registry.HookSource("nvidia_megakernel", "lowlat")
    around = hook_registry.HookType.AROUND
    registry.register(DRAFT_LISTING, with_host_lengths, around, source=source)
    registry.apply_hooks()
    # The registry passes over what it has hooked before, and logs what it fails at.
    if pkgutil.resolve_name(DRAFT_LISTING) is before:
        words = "lowlat: each draft waits for the GPU: SGLang hooks no more around %s"
        logger.warning(words, DRAFT_LISTING)


def with_host_lengths(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """The listing with a length for each request where SGLang has none on the host. Of tensors on a
    GPU it reads no more than how many they are; of others asking the tensor is no wait."""
    lengths = given.get(LENGTHS)
    if given.get(HOST_LENGTHS, lengths) is None and lengths is not None and lengths.is_cuda:
        given[HOST_LENGTHS] = lengths.new_ones(len(lengths), device="cpu")
    return original(*args, **given)
