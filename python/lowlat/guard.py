"""Why this server cannot be served: every reason at once, in the numbered words of
``lowlat._dispatch``. Before the weights load from the resolved settings, then from what was loaded.
"""

import json
from types import SimpleNamespace
from typing import Any

from lowlat import _dispatch, config, env
from lowlat.models import deepseek_v4, published
from lowlat.surface import SGLANG_VERSION

PLATFORM = "nvidia"
ISA = "sm_90"
AMD = "amd"
# Parts whose fp8 units have another format than the checkpoints'. SGLang reads its caches in theirs
# there, and its kernels that store the draft's context and a row's key write the checkpoints'.
FNUZ_ISAS = ("gfx942",)
# SGLang gives every wait half the watchdog's time, and less than 5 s is too short for a step.
SHORTEST_WATCHDOG_S = 10
# Page tables of captured steps are as wide as the context, and some rows of a step wider; the fused
# index reads 262,144 entries, which of V4.1 are as many tokens. Beyond, steps would be right and
# slower than SGLang's own.
LONGEST_CONTEXT = 262_000
# Tensor-parallel sizes whose steps, and a draft's layers, the fused kernels run inside SGLang.
FUSED_RANKS = (2, 4)


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
    """The NVIDIA specs': against the resolved settings `cfg` and the model's configuration."""
    from sglang.srt.kernel_plugins.nvidia.binding import features_in_use

    return settings_reasons(cfg, hf_config, PLATFORM, ISA, features_in_use(cfg))


def amd_config_reasons(cfg: Any, hf_config: Any) -> list[str]:
    """The AMD specs'."""
    from sglang.srt.kernel_plugins.amd.binding import device_isa, features_in_use

    isa = device_isa()
    reasons = settings_reasons(cfg, hf_config, AMD, isa, features_in_use(cfg))
    if isa in FNUZ_ISAS:
        words = (
            f"SGLang writes its caches on {isa} as e4m3fn and reads them as e4m3fnuz; these kernels"
            " need e4m3fn in both"
        )
        reasons.append(_dispatch.decline("tensor_dtype", words, "serve on gfx950"))
    if cfg.enable_hisparse:
        # Its contract has no such feature, and the caches are other ones.
        off = dict(_dispatch.features())["hisparse"]
        words = "hisparse is in use; these kernels need it off"
        reasons.append(_dispatch.decline("feature", words, off))
    return reasons


def settings_reasons(
    cfg: Any, hf_config: Any, platform: str, isa: str, in_use: set[Any]
) -> list[str]:
    """Against the resolved settings `cfg` and the model's configuration, before weights load.
    `in_use` are members of a contract's Feature."""
    from sglang.srt.environ import envs

    # A feature that only the contract knows is told by SGLang itself.
    known = dict(_dispatch.features())
    features = sorted(name for f in in_use if (name := f.name.lower()) in known)
    options = config.options(cfg, envs, features, isa=isa)
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
    if platform == PLATFORM:
        reasons += [*rank_reasons(cfg), *context_reasons(cfg, hf_config)]
    return [*kernels_reasons(platform), *reasons]


def rank_reasons(cfg: Any) -> list[str]:
    """Against numbers of ranks that would run right and slower than SGLang's own."""
    # Sizes that no kernels are for are the dispatcher's reason.
    sizes = config.requirements(ISA).values()
    is_built = any(cfg.tp_size in spec["tp_sizes"] for spec in sizes)
    if cfg.tp_size in FUSED_RANKS or not is_built or env.takes_slow_ranks():
        return []
    served = " or ".join(map(str, FUSED_RANKS))
    words = f"tp_size is {cfg.tp_size}, which the fast kernels do not run; these need {served}"
    return [_dispatch.decline("tp_size", words, f"--tp-size {FUSED_RANKS[-1]}")]


def runs_draft_layers(model: Any, tp_size: int) -> bool:
    """Whether a draft's layers are run too, and not its proposals alone: where SGLang's graph
    begins with tokens, and every row of a block is sampled."""
    from sglang.srt.environ import envs

    begins_with_tokens = envs.SGLANG_DSPARK_EMBED_IN_GRAPH.get() and model.sample_from_anchor
    return begins_with_tokens and tp_size in FUSED_RANKS and not env.takes_slow_ranks()


def context_reasons(cfg: Any, hf_config: Any) -> list[str]:
    """Against contexts that the fast kernels do not reach."""
    tokens = cfg.context_length or hf_config.max_position_embeddings
    if hf_config.model_type != deepseek_v4.V41 or tokens <= LONGEST_CONTEXT:
        return []
    words = f"context_length is {tokens}; these kernels need {LONGEST_CONTEXT} or less"
    return [_dispatch.decline("server_argument", words, f"--context-length {LONGEST_CONTEXT}")]


def target_reasons(model: Any, hf_config: Any) -> list[str]:
    """Against the loaded target on this rank."""
    return [*kernels_reasons(), *loaded_reasons(model, target_needs(model, hf_config))]


def draft_reasons(model: Any, hf_config: Any) -> list[str]:
    """Against the loaded DSpark draft on this rank."""
    whole = table(hf_config, {})
    stages = runs_draft_layers(model, whole.tp_size)
    return [*kernels_reasons(), *loaded_reasons(model, whole.draft(stages))]


def amd_target_reasons(model: Any, hf_config: Any, copies: dict[tuple, Any]) -> list[str]:
    """Against the loaded target and the copies of the checkpoint's tensors on this rank."""
    whole = table(hf_config, deepseek_v4.engram_rows(model)).target()
    in_place = [need for need in whole if published.is_read_in_place(need.name)]
    return [
        *kernels_reasons(AMD),
        *loaded_reasons(model, in_place),
        *published.reasons(copies, kernel_tensors(hf_config)),
    ]


def amd_draft_reasons(model: Any, hf_config: Any, copies: dict[tuple, Any]) -> list[str]:
    """Against the copies of the draft's tensors on this rank: nothing else of it is read before
    SGLang has attached the target's embedding and head."""
    wanted = kernel_tensors(hf_config, draft=True)
    return [*kernels_reasons(AMD), *published.reasons(copies, wanted)]


def kernel_tensors(hf_config: Any, draft: bool = False) -> list[dict[str, Any]]:
    """What the kernels read of a checkpoint on this rank, as ``HostedModel.tensors()``; nothing
    where the library does not load, which kernels_reasons tells. A listing needs no device."""
    try:
        from lowlat import _kernels, kernels
    except ImportError:
        return []
    from sglang.srt.runtime_context import get_parallel

    request = SimpleNamespace(
        config_json=config.published(hf_config),
        mode="draft" if draft else "decode",
        tokens_per_request=1,
        widths=(1,),
        tp_rank=0,
        tp_size=get_parallel().tp_size,
        page_size=deepseek_v4.PAGE_SIZE,
        wait_budget_ns=1_000_000_000,
        expert_layout=published.EXPERT_LAYOUT,
        copies={},
        stages=draft,
    )
    wanted = kernels.hosted_config(request)
    return _kernels.HostedModel("scalar", wanted, kernels.hosting(request, wanted)).tensors()


def target_needs(model: Any, hf_config: Any) -> list[deepseek_v4.Need]:
    """What the NVIDIA kernels read of the loaded target."""
    wide = deepseek_v4.expands_wo_a(model.named_parameters())
    return table(hf_config, deepseek_v4.engram_rows(model), wide).target()


def table(hf_config: Any, engram_rows: dict[int, int], wide: bool = False) -> deepseek_v4.Table:
    from sglang.srt.runtime_context import get_parallel

    published = json.loads(config.published(hf_config))
    return deepseek_v4.Table(published, get_parallel().tp_size, engram_rows, wide)


def loaded_reasons(model: Any, needs: list[deepseek_v4.Need]) -> list[str]:
    """How the loaded tensors differ from what the kernels read."""
    facts = deepseek_v4.facts(model, (need.name for need in needs))
    return _dispatch.check_loaded(facts, needs)
