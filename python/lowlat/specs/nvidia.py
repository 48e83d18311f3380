"""The NVIDIA specs of SGLang's kernel-plugin contract: one for DeepSeek-V4 and V4.1, one for their
DSpark draft. Requirements, features and reasons are the dispatcher's own.
"""

from lowlat import build, guard
from lowlat.specs.alike import API_VERSION, LOGITS_MEDIAN_REL, MAX_ROWS, alike

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


def requirements() -> Requirements:
    """What every model's kernels need."""
    needs = alike(guard.ISA)
    return Requirements(
        isas=frozenset({guard.ISA}),
        tp_sizes=needs.tp_sizes,
        resident_blocks=needs.resident_blocks,
        dtypes=needs.dtypes,
        server_args=needs.server_args,
        hf_config=needs.hf_config,
        env=needs.env,
    )


def features() -> frozenset[Feature]:
    """The features that all models' kernels accept."""
    names = alike(guard.ISA).features
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

# SGLang's widths are multiples of the rows of a verify step, one more than a draft's block has: the
# build says the draft's own, or none where SGLang runs its layers.
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
