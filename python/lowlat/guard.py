"""Why this server cannot be served: every reason at once, in the numbered words of
``lowlat._dispatch``. Before the weights load from the resolved settings, then from what was loaded.
"""

import json
from typing import Any

from lowlat import _dispatch, config
from lowlat.models import deepseek_v4
from lowlat.surface import SGLANG_VERSION

PLATFORM = "nvidia"
ISA = "sm_90"
# SGLang gives every wait half the watchdog's time, and less than 5 s is too short for a step.
SHORTEST_WATCHDOG_S = 10
# Page tables of captured steps are as wide as the context, and some rows of a step wider; the fused
# index reads 262,144 entries, which of V4.1 are as many tokens. Beyond, steps would be right and
# slower than SGLang's own.
LONGEST_CONTEXT = 262_000


def version_reasons() -> list[str]:
    """Against an SGLang that this plugin was not made for."""
    import sglang

    seen = sglang.__version__
    if seen == SGLANG_VERSION:
        return []
    words = f"SGLang is {seen}; this plugin was made for {SGLANG_VERSION} and tested with no other"
    return [_dispatch.decline("engine_version", words, f"pip install sglang=={SGLANG_VERSION}")]


def kernels_reasons(platform: str = PLATFORM) -> list[str]:
    """Against an installation whose library has no kernels for the device."""
    change = "install a lowlat that was built with them"
    try:
        from lowlat import _kernels
    except ImportError as error:
        words = f"lowlat._kernels does not load: {' '.join(str(error).split())}"
        return [_dispatch.decline("kernels_missing", words, change)]
    refusal = _kernels.model_refusal(platform)
    if not refusal:
        return []
    words = f"the installed kernel library makes no model on {platform}: {refusal}"
    return [_dispatch.decline("kernels_missing", words, change)]


def config_disable_reasons(cfg: Any, hf_config: Any) -> list[str]:
    """Against the resolved settings `cfg` and the model's configuration, before weights load."""
    from sglang.srt.environ import envs
    from sglang.srt.kernel_plugins.nvidia.binding import features_in_use

    features = sorted(feature.name.lower() for feature in features_in_use(cfg))
    options = config.options(cfg, envs, features, isa=ISA)
    reasons = _dispatch.check(config.published(hf_config), options)
    watchdog = cfg.watchdog_timeout
    if watchdog and 0 < watchdog < SHORTEST_WATCHDOG_S:
        words = (
            f"watchdog_timeout is {watchdog:g} s; these kernels need {SHORTEST_WATCHDOG_S} s or"
            " more, or none"
        )
        reasons.append(_dispatch.decline("server_argument", words, "--watchdog-timeout 300"))
    if cfg.enable_encoder_swa_bounded_replay:
        words = "windows of keys are the requests' own; these kernels need them in pages"
        change = "leave out --enable-encoder-swa-bounded-replay"
        reasons.append(_dispatch.decline("server_argument", words, change))
    return [*kernels_reasons(), *reasons, *context_reasons(cfg, hf_config)]


def context_reasons(cfg: Any, hf_config: Any) -> list[str]:
    """Against contexts that the fast kernels do not reach."""
    tokens = cfg.context_length or hf_config.max_position_embeddings
    if hf_config.model_type != deepseek_v4.V41 or tokens <= LONGEST_CONTEXT:
        return []
    words = f"context_length is {tokens}; these kernels need {LONGEST_CONTEXT} or less"
    return [_dispatch.decline("server_argument", words, f"--context-length {LONGEST_CONTEXT}")]


def target_reasons(model: Any, hf_config: Any) -> list[str]:
    """Against the loaded target on this rank."""
    rows = deepseek_v4.engram_rows(model)
    return [*kernels_reasons(), *loaded_reasons(model, table(hf_config, rows).target())]


def draft_reasons(model: Any, hf_config: Any) -> list[str]:
    """Against the loaded DSpark draft on this rank."""
    return [*kernels_reasons(), *loaded_reasons(model, table(hf_config, {}).draft())]


def table(hf_config: Any, engram_rows: dict[int, int]) -> deepseek_v4.Table:
    from sglang.srt.runtime_context import get_parallel

    published = json.loads(config.published(hf_config))
    return deepseek_v4.Table(published, get_parallel().tp_size, engram_rows)


def loaded_reasons(model: Any, needs: list[deepseek_v4.Need]) -> list[str]:
    """How the loaded tensors differ from what the kernels read."""
    facts = deepseek_v4.facts(model, (need.name for need in needs))
    return _dispatch.check_loaded(facts, needs)
