"""The table of tensors beside SGLang's own model classes, made on the meta device: names, shapes
and dtypes are theirs.

What happens to weights after loading needs a GPU: the experts' Marlin layout and V4's reshaped
scale are put in place here as SGLang's code for sm_90 leaves them.
"""

import json

import pytest
import served
from lowlat import _dispatch
from real_models import checkpoint
from sglang.srt.layers.engram import EngramLayout, compute_hash_multipliers

MODELS_BUDGET_S = 400


# V4's `wo_a` is bf16 on Hopper, unless SGLang is told to keep it in fp8.
MODELS = [
    ("v4-flash", {"SGLANG_OPT_FP8_WO_A_GEMM": "1"}),
    ("v4-flash", {"SGLANG_OPT_FP8_WO_A_GEMM": "0"}),
    ("v41-flash", {}),
]


@pytest.fixture(scope="module", params=MODELS, ids=["v4-flash", "v4-flash wide", "v41-flash"])
def told(request, tmp_path_factory):
    """What two ranks say; they are processes, for SGLang's parallel state is a process's own."""
    folder = tmp_path_factory.mktemp("models")
    name, env = request.param
    checkpoint(name, folder)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in env.items():
            patch.setenv(key, value)
        first, second = served.ranks("real_models.py", folder, 2, MODELS_BUDGET_S)
    assert first == second
    return first


def test_sglangs_own_target_has_every_tensor_as_the_table_says(told) -> None:
    assert told["target"] == []


def test_sglangs_own_draft_has_every_tensor_as_the_table_says(told) -> None:
    assert told["draft"] == []


def test_every_large_weight_of_the_target_is_in_the_table(told) -> None:
    """What the kernels do not read of a layer: constants of the cache, the rotary tables and the
    vision tower's own."""
    assert told["unread"] == ["self_attn.attn_mqa.k_scale", "self_attn.attn_mqa.v_scale"]


def test_every_large_weight_of_the_drafts_layers_is_in_the_table(told) -> None:
    """But for the context's projection, which SGLang runs, and constants of the cache."""
    assert told["unread_draft"] == [
        "main_norm.weight",
        "main_proj.weight",
        "main_proj.weight_scale_inv",
        "self_attn.attn.k_scale",
        "self_attn.attn.v_scale",
    ]


def test_experts_before_the_marlin_preparation_are_refused(told) -> None:
    experts = "model.layers.0.mlp.experts"
    for start in (f"[110] {experts}.w13_weight_scale is not", f"[112] shape of {experts}.w13_wei"):
        assert any(line.startswith(start) for line in told["unprepared"]), start


@pytest.mark.parametrize("name", ["tiny-v41", "v41-flash"])
def test_the_engram_hash_is_sglangs(name) -> None:
    """Primes and multipliers address the table's rows, so they are SGLang's to the last digit."""
    config = served.hf_config(_dispatch.built_in(name))
    ours = json.loads(_dispatch.kernel_config(_dispatch.built_in(name)))
    layout = EngramLayout.from_config(config)
    assert ours["engram_primes"] == [[list(sizes) for sizes in layer] for layer in layout.primes]
    factors = compute_hash_multipliers(
        layout.layer_ids, layout.max_ngram_size, config.engram_compressed_vocab_size
    )
    assert ours["engram_multipliers"] == factors.tolist()
    assert ours["engram_pad_token"] == config.engram_pad_token_id
