"""Argument resolution by SGLang's own code: what is served, and every reason against the rest."""

import argparse
import json
import re
from pathlib import Path

import pytest
import sglang
from lowlat import _dispatch, config, guard
from served import refusal, resolve
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.environ import envs
from sglang.srt.kernel_plugins.nvidia import binding
from sglang.srt.server_args import ServerArgs

MODELS = ("v4-flash", "v41-flash")
pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_the_true_configurations_are_served(
    name, tp_size, checkpoint, kernels_there, monkeypatch
) -> None:
    if tp_size not in guard.FUSED_RANKS:
        monkeypatch.setenv("LOWLAT_SLOW_RANKS", "1")
    args = resolve(checkpoint(name), tp_size=tp_size)
    cfg = resolving_view(args)
    assert (cfg.attention_backend, cfg.page_size, cfg.kv_cache_dtype) == ("dsv4", 256, "fp8_e4m3")
    # The verify window, and capture sizes that the built widths cover.
    assert cfg.speculative_num_draft_tokens == 6
    assert set(range(1, 9)) <= set(cfg.cuda_graph_config.decode.bs)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_the_fast_kernels_do_not_run_are_refused(
    name, checkpoint, kernels_there
) -> None:
    (line,) = refusal(checkpoint(name), tp_size=8)
    assert line == (
        "[102] tp_size is 8, which the fast kernels do not run; these need 2 or 4"
        " (change: --tp-size 4)"
    )


@pytest.mark.parametrize("vision", [False, True])
def test_v41_with_its_text_in_a_part_of_its_own_is_served(
    vision, checkpoint, kernels_there
) -> None:
    """The other shape that V4.1's configuration is published in."""
    folder = checkpoint("v41-flash")
    path = folder / "config.json"
    text = json.loads(path.read_text())
    whole = {
        "architectures": text.pop("architectures"),
        "model_type": text.pop("model_type"),
        "quantization_config": text.pop("quantization_config"),
        "text_config": text | {"model_type": "deepseek_v41_text"},
    }
    if vision:
        tower = dict(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16)
        whole["vision_config"] = tower | {"model_type": "deepseek_v41_vision"}
    path.write_text(json.dumps(whole))
    resolve(folder)
    lines = refusal(folder, tp_size=3)
    assert any(line.startswith("[105] vocab_size is 129280;") for line in lines)


@pytest.mark.parametrize("name", MODELS)
def test_a_server_without_speculation_is_served(name, checkpoint, kernels_there) -> None:
    resolve(checkpoint(name), speculative_algorithm=None, speculative_dspark_block_size=None)


@pytest.mark.parametrize("name", MODELS)
def test_the_guard_reads_sglangs_configuration_as_the_published_one(name, checkpoint) -> None:
    """SGLang moves and renames fields; what the guard is asked must say the same as the file."""
    args = resolve(checkpoint(name), enable_nvidia_megakernel=False)
    seen = json.loads(config.published(model_config_of(args).hf_config))
    for field, value in json.loads(_dispatch.built_in(name)).items():
        if field in ("architectures", "torch_dtype"):
            continue
        if field == "rope_scaling":
            value = value | {"rope_type": value["type"]}
        assert seen[field] == value, field
    options = {"isa": "sm_90", "tp_size": 4, "page_size": 256, "moe_runner_backend": "marlin"}
    assert _dispatch.check(json.dumps(seen), options) == []


def test_without_nvidia_kernels_that_is_the_reason_and_the_only_one(checkpoint) -> None:
    (line,) = refusal(checkpoint("v41-flash"))
    assert line.startswith("[116] the installed kernel library makes no model on nvidia")


def test_with_the_flag_off_nothing_is_asked(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(guard, "config_disable_reasons", pytest.fail)
    resolve(checkpoint("v41-flash"), enable_nvidia_megakernel=False, tp_size=4)


ALL_OF_IT = dict(tp_size=3, moe_runner_backend="auto", watchdog_timeout=8.0)

# name of the case: what is asked for, what each of these lines must say
REFUSED = {
    "tp 3": (
        dict(tp_size=3),
        [
            r"tp_size 3 is not one of \['2', '4', '8'\]",
            r"\[102\] tp_size is 3; these kernels need 1, 2, 4 or 8 \(change: --tp\)",
            r"\[105\] vocab_size is 129280; .* a multiple of tp_size \(3\)",
        ],
    ),
    "another runner": (
        dict(moe_runner_backend="auto"),
        [
            r"moe_runner_backend 'auto' is not one of \['marlin'\]",
            r"\[106\] moe_runner_backend is auto; .* \(change: --moe-runner-backend marlin\)",
        ],
    ),
    "expert parallel": (
        dict(ep_size=2),
        [
            r"expert parallelism is in use and lowlat-deepseek-v4 does not accept it",
            r"\[109\] expert parallel is in use; .* \(change: --ep-size 1\)",
        ],
    ),
    "lora": (
        dict(lora_paths=["a=b"], max_lora_rank=8, lora_target_modules=["all"]),
        [r"\[109\] lora is in use; .* \(change: leave out --enable-lora and --lora-paths\)"],
    ),
    "torch compile": (
        dict(enable_torch_compile=True),
        [r"\[109\] torch compile is in use; .* \(change: leave out --enable-torch-compile\)"],
    ),
    "watchdog of 8 s": (
        dict(watchdog_timeout=8.0),
        [
            r"--watchdog-timeout 8 s leaves the waits a deadline under 5 s",
            r"\[106\] watchdog_timeout is 8 s; .* \(change: --watchdog-timeout 300\)",
        ],
    ),
    "both flags": (
        dict(enable_amd_monokernel=True),
        [r"--enable-amd-monokernel is also set; use one of the two"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", REFUSED)
def test_every_reason_is_told_in_numbers_and_words(case, name, checkpoint, kernels_there) -> None:
    asked, wanted = REFUSED[case]
    lines = refusal(checkpoint(name), **asked)
    for words in wanted:
        assert any(re.fullmatch(words, line) or re.match(words, line) for line in lines), (
            words,
            lines,
        )


@pytest.mark.parametrize(("asked", "tokens"), [(262_001, 262_001), (None, 1_048_576)])
def test_a_context_beyond_the_fast_kernels_is_refused(
    checkpoint, kernels_there, asked, tokens
) -> None:
    (line,) = refusal(checkpoint("v41-flash"), context_length=asked)
    assert line == (
        f"[106] context_length is {tokens}; these kernels need 262000 or less"
        " (change: --context-length 262000)"
    )


def test_windows_that_are_requests_own_are_refused(checkpoint, kernels_there) -> None:
    """SGLang resolves the setting on a GPU alone, so the question is put to the guard itself."""
    args = resolve(checkpoint("v41-flash"))

    class Asked:
        enable_encoder_swa_bounded_replay = True

        def __getattr__(self, name):
            return getattr(args, name)

    told = guard.config_disable_reasons(Asked(), model_config_of(args).hf_config)
    (line,) = [line for line in told if "windows" in line]
    assert line.startswith("[106] windows of keys are the requests' own; ")
    assert line.endswith("(change: leave out --enable-encoder-swa-bounded-replay)")


@pytest.mark.parametrize(("name", "tokens"), [("v41-flash", 262_000), ("v4-flash", None)])
def test_a_context_that_the_kernels_reach_is_accepted(checkpoint, kernels_there, name, tokens):
    resolve(checkpoint(name), context_length=tokens)


def test_every_reason_is_told_at_once(checkpoint, kernels_there) -> None:
    lines = refusal(checkpoint("v4-flash"), **ALL_OF_IT)
    numbers = {line[1:4] for line in lines if line.startswith("[")}
    assert {"102", "105", "106"} <= numbers
    assert sum("watchdog" in line for line in lines) == 2


ENVIRONMENT = {
    "SGLANG_DSV4_KV_LAYOUT": "v41",
    "SGLANG_DSV4_FP4_DEQUANT": True,
    "SGLANG_DSV4_FP4_EXPERTS": False,
    "SGLANG_OPT_FUSE_WQA_WKV": False,
    "SGLANG_DSV4_COMPRESS_STATE_DTYPE": "bfloat16",
    "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": True,
    "SGLANG_DSPARK_OPT_MARKOV_W2_BF16": False,
    "SGLANG_DSPARK_DEFER_CONTEXT_KV": True,
}


def test_the_environment_cases_are_all_that_the_guard_looks_at() -> None:
    specs = config.requirements("sm_90").values()
    assert {row["name"] for spec in specs for row in spec["env"]} == set(ENVIRONMENT)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_layout_by_environment_is_refused(name, checkpoint, kernels_there) -> None:
    from lowlat.specs.nvidia import TARGET

    folder = checkpoint("v41-flash")
    args = resolve(folder, enable_nvidia_megakernel=False)
    hf_config = model_config_of(args).hf_config
    with getattr(envs, name).override(ENVIRONMENT[name]):
        _, reasons = binding.megakernel_disable_reasons(
            cfg=resolving_view(args), hf_config=hf_config, isa="sm_90"
        )
    needed = TARGET.requires.env[name]
    assert f"{name} {ENVIRONMENT[name]!r} is not {needed!r}" in reasons
    assert any(line.startswith(f"[107] {name} is ") and f"{name}=" in line for line in reasons)


class Changed:
    """Resolved settings, some of them as SGLang's resolution would not leave them today."""

    def __init__(self, cfg, **changes):
        self.cfg, self.changes = cfg, changes

    def __getattr__(self, name):
        return self.changes[name] if name in self.changes else getattr(self.cfg, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_backend", "triton"),
        ("kv_cache_dtype", "bfloat16"),
        ("page_size", 64),
        ("speculative_algorithm", "EAGLE"),
    ],
)
def test_a_layout_by_argument_is_refused(name, value, checkpoint, kernels_there) -> None:
    args = resolve(checkpoint("v41-flash"), enable_nvidia_megakernel=False)
    _, reasons = binding.megakernel_disable_reasons(
        cfg=Changed(resolving_view(args), **{name: value}),
        hf_config=model_config_of(args).hf_config,
        isa="sm_90",
    )
    flag = f"--{name.replace('_', '-')}"
    assert any(
        line.startswith(f"[106] {name} is {value}; these kernels need ")
        and f"(change: {flag} " in line
        for line in reasons
    ), reasons


def test_ragged_verify_is_refused(checkpoint, kernels_there) -> None:
    args = resolve(checkpoint("v41-flash"), enable_nvidia_megakernel=False)
    with envs.SGLANG_RAGGED_VERIFY_MODE.override("compact"):
        _, reasons = binding.megakernel_disable_reasons(
            cfg=resolving_view(args), hf_config=model_config_of(args).hf_config, isa="sm_90"
        )
    assert any(
        line.startswith("[109] ragged verify is in use")
        and "SGLANG_RAGGED_VERIFY_MODE=static" in line
        for line in reasons
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(expert_dtype="fp8"), r'\[114\] expert_dtype is "fp8"; these kernels need "fp4"'),
        (
            dict(quantization_config=dict(quant_method="awq", bits=4, group_size=128)),
            r'\[114\] quantization_config.quant_method is "awq"; these kernels need "fp8"',
        ),
        (
            dict(quantization_config=None),
            r'\[114\] quantization_config.quant_method is "none"; these kernels need "fp8"',
        ),
        (dict(hidden_size=2048), r"\[104\] hidden_size is 2048; these kernels need 4096"),
        (dict(o_groups=4), r"config.o_groups 4 is not 8"),
    ],
)
def test_another_checkpoint_is_refused(changes, words, checkpoint, kernels_there) -> None:
    """Asked as resolution asks, of a configuration that SGLang itself may refuse earlier."""
    args = resolve(checkpoint("v4-flash"), enable_nvidia_megakernel=False)
    hf_config = model_config_of(args).hf_config
    for name, value in changes.items():
        setattr(hf_config, name, value)
    _, reasons = binding.megakernel_disable_reasons(
        cfg=resolving_view(args), hf_config=hf_config, isa="sm_90"
    )
    assert any(re.match(words, line) for line in reasons), reasons


@pytest.mark.parametrize("isa", [None, "sm_80", "sm_100", "sm_103"])
def test_another_gpu_is_refused(isa, gpu, checkpoint) -> None:
    gpu.isa = isa
    (line,) = refusal(checkpoint("v41-flash"))
    if isa is None:
        assert line == "no GPU is visible"
    else:
        assert line == f"lowlat.specs.nvidia:TARGET supports ['sm_90'], not {isa}"


def test_another_dtype_is_refused(checkpoint, kernels_there) -> None:
    lines = refusal(checkpoint("v41-flash"), dtype="float16")
    assert "dtype 'float16' is not one of ['bfloat16']" in lines


def test_another_release_is_refused_with_both_versions(checkpoint, monkeypatch) -> None:
    import sys

    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    monkeypatch.delitem(sys.modules, "lowlat.specs.nvidia")
    (line,) = refusal(checkpoint("v41-flash"))
    assert "[115] SGLang is 0.5.24; this plugin was made for 0.5.23" in line
    assert "(change: pip install sglang==0.5.23)" in line


def test_another_contract_is_refused(checkpoint, monkeypatch) -> None:
    from sglang.kernels.plugin_kernels.nvidia import spec

    monkeypatch.setattr(spec, "MEGAKERNEL_API_VERSION", 2)
    (line,) = refusal(checkpoint("v41-flash"))
    assert "uses megakernel API version 1; this SGLang requires version 2" in line


def test_a_missing_kernel_library_is_refused(checkpoint, monkeypatch) -> None:
    import sys

    import lowlat

    monkeypatch.setitem(sys.modules, "lowlat._kernels", None)
    monkeypatch.delattr(lowlat, "_kernels", raising=False)
    (line,) = refusal(checkpoint("v41-flash"))
    assert line.startswith("[116] lowlat._kernels does not load: ")


def flags_of(text):
    return set(re.findall(r"--[a-z][a-z0-9-]+", text))


def test_every_setting_that_a_refusal_names_is_one_of_sglangs() -> None:
    """The settings that switch a feature off, and those of the page's cures and commands."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    page = Path(__file__).parents[2] / "docs" / "sglang.md"
    # Commands of other programs: lowlat's own, its test on a GPU, and SGLang's client.
    theirs = {"--model", "--tp", "--isa", "--backend", "--dataset-name", "--random-input-len"}
    theirs |= {"--random-output-len", "--num-prompts", "--max-concurrency", "--out", "--share"}
    theirs |= {"--accept", "--eager", "--fault", "--batches", "--graphs", "--timed"}
    theirs |= {"--timed-tokens", "--context", "--pool", "--crowd", "--arms", "--greedy", "--chain"}
    theirs |= {"--together", "--trace"}
    named = flags_of(page.read_text()) - theirs
    for _, off in _dispatch.features():
        named |= flags_of(off)
    assert {"--moe-runner-backend", "--ep-size", "--watchdog-timeout"} <= named
    assert named - known == set()
    for _, off in _dispatch.features():
        for variable in re.findall(r"\bSGLANG_\w+", off):
            assert hasattr(envs, variable)
