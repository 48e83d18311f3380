"""The AMD specs of SGLang's monokernel contract: one for DeepSeek-V4 and V4.1, one for the layers
of their DSpark draft, whose proposals stay SGLang's because the contract has no sampler.
Requirements, features and reasons are the dispatcher's own. The kernels never ran on an AMD GPU:
docs/amd.md says what is shown and how.
"""

from lowlat import build, config, guard
from lowlat.models import published
from lowlat.specs.alike import (
    API_VERSION,
    DRAFT_LOGITS_MEDIAN_REL,
    LOGITS_MEDIAN_REL,
    MAX_REQUESTS,
    MAX_ROWS,
    Alike,
    alike,
)

_WRONG_VERSION = guard.version_reasons()
if _WRONG_VERSION:
    # SGLang reports the words, and stops before it loads weights.
    raise RuntimeError(_WRONG_VERSION[0])

from sglang.kernels.plugin_kernels.amd.spec import (  # noqa: E402 (after the version is known)
    DeviceLimits,
    Feature,
    MonoSpec,
    Numerics,
    NumericsKind,
    Requirements,
    StepMetadata,
)

# Rows of steps: of plain decoding, and of verify steps of 6 rows a request, each with 1 to 8
# requests. SGLang takes those that are multiples of the server's own rows a request, so a plain
# server also gets batches of 12, 18 .. 48.
VERIFY_ROWS = MAX_ROWS // MAX_REQUESTS
WIDTHS = (
    *range(1, MAX_REQUESTS + 1),
    *range(2 * VERIFY_ROWS, MAX_ROWS + 1, VERIFY_ROWS),
)
# Of a draft's blocks, which have a row less a request than the server's verify steps; of them the
# build takes those of up to 8 requests, and more run SGLang's layers.
DRAFT_WIDTHS = tuple(range(1, MAX_ROWS + 1))
# The whole step's logits, median over rows of |logits - float64| / |float64|. The code objects are
# near the scalar kernels (interpreted): products and sums over a row have other orders, which moves
# at most one output of a tiny layer in a thousand. Against SGLang's own kernels nothing was
# measured.
NUMERICS = Numerics(NumericsKind.TOLERANCE, {"step.logits.rel": LOGITS_MEDIAN_REL})
# The same of what the draft's head makes of the layers' output.
DRAFT_NUMERICS = Numerics(NumericsKind.TOLERANCE, {"draft.logits.rel": DRAFT_LOGITS_MEDIAN_REL})


def device_limits(needs: Alike, widths: tuple[int, ...]) -> DeviceLimits:
    """What the kernels support on one part."""
    return DeviceLimits(
        widths=widths,
        tp_sizes=tuple(sorted(needs.tp_sizes)),
        resident_blocks=needs.resident_blocks,
    )


def requirements(needs: Alike) -> Requirements:
    """What every model's kernels need; the attention backend is asked for under its own field."""
    server_args = dict(needs.server_args)
    return Requirements(
        dtypes=needs.dtypes,
        attention_backends=server_args.pop("attention_backend"),
        server_args=server_args,
        hf_config=needs.hf_config,
        env=needs.env,
    )


def features(needs: Alike) -> frozenset[Feature]:
    """The features that all models' kernels accept."""
    return frozenset(feature for feature in Feature if feature.name.lower() in needs.features)


PARTS = {isa: alike(isa) for isa in config.amd_isas()}
# Nothing but the size of a part differs between them.
FIRST = next(iter(PARTS.values()))

TARGET = MonoSpec(
    name="lowlat-deepseek-v4",
    devices={isa: device_limits(needs, WIDTHS) for isa, needs in PARTS.items()},
    features=features(FIRST),
    requires=requirements(FIRST),
    numerics=NUMERICS,
    model_disable_reasons=guard.amd_target_reasons,
    build=build.amd_target,
    api_version=API_VERSION,
    config_disable_reasons=guard.amd_config_reasons,
    load_tensor=published.keep,
    # Index scores are our kernels' own, from the page table.
    unread_metadata=frozenset({StepMetadata.LOW_RATIO_DECODE_SCHEDULE}),
)

DRAFT = MonoSpec(
    name="lowlat-deepseek-v4-dspark",
    devices={isa: device_limits(needs, DRAFT_WIDTHS) for isa, needs in PARTS.items()},
    features=features(FIRST),
    requires=requirements(FIRST),
    numerics=DRAFT_NUMERICS,
    model_disable_reasons=guard.amd_draft_reasons,
    build=build.amd_draft,
    api_version=API_VERSION,
    load_tensor=published.keep_draft,
    tokens_per_request=build.draft_rows,
)
