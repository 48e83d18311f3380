"""The NVIDIA specs of SGLang's kernel-plugin contract: one for DeepSeek-V4 and V4.1, one for their
DSpark draft. Requirements, features and reasons are the dispatcher's own.
"""

from typing import Any

from lowlat import build, config, guard

_WRONG_VERSION = guard.version_reasons()
if _WRONG_VERSION:
    # SGLang reports the words, and stops before it loads weights.
    raise RuntimeError(_WRONG_VERSION[0])

from sglang.kernels.plugin_kernels.nvidia.spec import (  # noqa: E402 (after the version is known)
    Feature,
    MegakernelSpec,
    Numerics,
    NumericsKind,
    Requirements,
)

API_VERSION = 1
# Rows of 8 requests with 5 drafts each, the widest step of the kernels.
MAX_ROWS = 48
# Median over rows of |logits - float64| / |float64|, as tests/python/test_whole_model.py holds it
# for the scalar kernels; against SGLang's own kernels it is not measured.
LOGITS_MEDIAN_REL = 0.03


def common(settings: list[list[dict[str, Any]]]) -> dict[str, list[Any]]:
    """Accepted values of the settings that all models require alike, by name."""
    first, *rest = [{row["name"]: row["accepted"] for row in rows} for rows in settings]
    same = {
        name: all(other.get(name) == accepted for other in rest) for name, accepted in first.items()
    }
    return {name: accepted for name, accepted in first.items() if same[name]}


def requirements() -> Requirements:
    """What every model's kernels need; what differs between models is left to the guard."""
    specs = list(config.requirements(guard.ISA).values())
    # The model's own class decides these, under names that its configuration has no more.
    published_only = {"model_type", "weight_block_size"}
    model = common([spec["model"] for spec in specs])
    server_args = common([spec["server_args"] for spec in specs])
    # Where no value is accepted too (no speculation), an exact set would refuse it.
    server_args.pop("speculative_algorithm")
    return Requirements(
        isas=frozenset({guard.ISA}),
        # A rank alone is for tests of the kernels, not for a server.
        tp_sizes=frozenset(size for size in specs[0]["tp_sizes"] if size > 1),
        resident_blocks=max(spec["resident_blocks"] for spec in specs),
        dtypes=frozenset(specs[0]["dtypes"]),
        server_args={name: frozenset(accepted) for name, accepted in server_args.items()},
        hf_config={
            name: accepted[0] for name, accepted in model.items() if name not in published_only
        },
        env={
            name: accepted[0] for name, accepted in common([spec["env"] for spec in specs]).items()
        },
    )


def features() -> frozenset[Feature]:
    """The features that all models' kernels accept."""
    specs = config.requirements(guard.ISA).values()
    names = set.intersection(*(set(spec["features"]) for spec in specs))
    return frozenset(feature for feature in Feature if feature.name.lower() in names)


NUMERICS = Numerics(NumericsKind.TOLERANCE, {"logits.median_rel": LOGITS_MEDIAN_REL})

TARGET = MegakernelSpec(
    name="lowlat-deepseek-v4",
    requires=requirements(),
    features=features(),
    numerics=NUMERICS,
    max_rows=MAX_ROWS,
    build=build.target,
    api_version=API_VERSION,
    model_disable_reasons=guard.target_reasons,
    config_disable_reasons=guard.config_disable_reasons,
)

# It covers no step: SGLang runs the draft's layers, and ours is the sampler behind them.
DRAFT = MegakernelSpec(
    name="lowlat-deepseek-v4-dspark",
    requires=requirements(),
    features=features(),
    numerics=NUMERICS,
    max_rows=0,
    build=build.draft,
    api_version=API_VERSION,
    model_disable_reasons=guard.draft_reasons,
)
