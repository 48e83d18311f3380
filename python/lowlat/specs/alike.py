"""What every model's kernels for one machine code need alike, in the words that the contracts of
both vendors share. What differs between models is left to the guard.
"""

from typing import Any, NamedTuple

from lowlat import config

API_VERSION = 1
MAX_REQUESTS = 8
# Rows of 8 requests with 5 drafts each, the widest step of the kernels.
MAX_ROWS = 48
# Median over rows of |logits - float64| / |float64|, as tests/python/test_whole_model.py holds it
# for the scalar kernels.
LOGITS_MEDIAN_REL = 0.03
# The same of a draft's, from what its layers leave.
DRAFT_LOGITS_MEDIAN_REL = 0.06
# The target's against SGLang's own forward on Hopper, as tests/gpu/sglang/engine.py holds it: about
# what that one's logits move by when its embeddings do by one rounding (docs/numerics.md).
LOGITS_MEDIAN_REL_OF_SGLANG = 0.1


class Alike(NamedTuple):
    """Fields of both contracts' requirements, and the names of the accepted features."""

    tp_sizes: frozenset[int]
    resident_blocks: int
    dtypes: frozenset[str]
    server_args: dict[str, frozenset]
    hf_config: dict[str, Any]
    env: dict[str, Any]
    features: frozenset[str]


def common(settings: list[list[dict[str, Any]]]) -> dict[str, list[Any]]:
    """Accepted values of the settings that all models require alike, by name."""
    first, *rest = [{row["name"]: row["accepted"] for row in rows} for rows in settings]
    same = {
        name: all(other.get(name) == accepted for other in rest) for name, accepted in first.items()
    }
    return {name: accepted for name, accepted in first.items() if same[name]}


def alike(isa: str) -> Alike:
    """Of the dispatcher's requirements for this machine code."""
    specs = list(config.requirements(isa).values())
    # The model's own class decides these, under names that its configuration has no more.
    published_only = {"model_type", "weight_block_size"}
    model = common([spec["model"] for spec in specs])
    server_args = common([spec["server_args"] for spec in specs])
    # Where no value is accepted too (no speculation), an exact set would refuse it.
    server_args.pop("speculative_algorithm")
    env = common([spec["env"] for spec in specs])
    return Alike(
        # A rank alone is for tests of the kernels, not for a server.
        tp_sizes=frozenset(size for size in specs[0]["tp_sizes"] if size > 1),
        resident_blocks=max(spec["resident_blocks"] for spec in specs),
        dtypes=frozenset(specs[0]["dtypes"]),
        server_args={name: frozenset(accepted) for name, accepted in server_args.items()},
        hf_config={
            name: accepted[0] for name, accepted in model.items() if name not in published_only
        },
        # A contract compares with one value; of several the guard tells.
        env={name: accepted[0] for name, accepted in env.items() if len(accepted) == 1},
        features=frozenset(set.intersection(*(set(spec["features"]) for spec in specs))),
    )
