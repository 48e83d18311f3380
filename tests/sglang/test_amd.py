"""The AMD entry point through SGLang's own code: discovery, resolution and every refusal, copies of
the weights as they load, install, dispatch and capture check, with kernels that stand in. What the
kernels compute is test_forward.py's. Nothing of this ran on an AMD GPU.
"""

import argparse
import logging
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import published
import pytest
import served
import sglang
import torch
from lowlat import _dispatch, build, guard, plugin
from lowlat.models import published as copying
from lowlat.reasons import RefusalError
from lowlat.specs import amd as specs
from sglang.kernels.ops.quantization import fp8_kernel
from sglang.kernels.plugin_kernels.amd import spec as contract
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.environ import envs
from sglang.srt.kernel_plugins.amd import binding
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins_by_group
from sglang.srt.server_args import ServerArgs

pytestmark = pytest.mark.usefixtures("amd_gpu")
MODELS = ("v4-flash", "v41-flash")
NAMES = ("tiny-v4", "tiny-v41")
ARCHITECTURE = "LowlatTestForCausalLM"
FLAG = served.AMD_FLAG
WRITER_BUDGET_S = 300


def resolve(model, **more):
    return served.resolve(model, **served.AMD_ARGS | more)


def refusal(model, **more):
    return served.refusal(model, flag=FLAG, **served.AMD_ARGS | more)


# ------------------------------------------------------------------ discovery


@pytest.mark.parametrize(
    ("architecture", "spec"), [(plugin.TARGET, specs.TARGET), (plugin.DRAFT, specs.DRAFT)]
)
def test_the_loader_registered_target_and_draft_for_both_parts(architecture, spec) -> None:
    assert contract._REGISTRY[contract.BACKEND] == plugin.AMD_SPECS
    for isa in ("gfx950", "gfx942"):
        found, why = contract.find_spec(
            backend=contract.BACKEND, architectures=[architecture], isa=isa
        )
        assert found is spec and not why


def test_registering_again_changes_nothing_and_another_spec_is_an_error() -> None:
    plugin.register_amd()
    with pytest.raises(ValueError, match="already has a spec for DeepseekV4ForCausalLM: lowlat"):
        contract.register(
            backend=contract.BACKEND, architecture="DeepseekV4ForCausalLM", path="other:SPEC"
        )


@pytest.mark.parametrize(("allowed", "loaded"), [("amd_monokernel", True), ("other", False)])
def test_the_filter_of_plugins_is_obeyed(allowed, loaded) -> None:
    with envs.SGLANG_PLUGINS.override(allowed):
        assert ("amd_monokernel" in load_plugins_by_group(GENERAL_PLUGINS_GROUP)) is loaded


def test_without_the_plugin_the_refusal_names_what_is_missing(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(contract, "_REGISTRY", {})
    (line,) = refusal(checkpoint("v4-flash"))
    assert line.startswith("no monokernel backend 'amd' is registered")


def test_an_sglang_before_the_contract_gets_a_line_and_no_error(monkeypatch, caplog) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sglang.kernels.plugin_kernels.amd.spec", None)
    with caplog.at_level(logging.INFO, logger="lowlat.plugin"):
        plugin.register_amd()
    assert "no kernel-plugin contract" in caplog.text


# ------------------------------------------------------------------ resolution


@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_the_true_configurations_are_served(name, tp_size, checkpoint, kernels_there) -> None:
    args = resolve(checkpoint(name), tp_size=tp_size)
    cfg = resolving_view(args)
    assert cfg.speculative_num_draft_tokens == 6
    # The sizes that the widths cover come first, then SGLang's above them.
    sizes = cfg.cuda_graph_config.decode.bs
    assert sizes[:8] == list(range(1, 9)) and sizes == sorted(sizes)


@pytest.mark.parametrize("name", MODELS)
def test_a_server_without_speculation_is_served(name, checkpoint, kernels_there) -> None:
    args = resolve(checkpoint(name), speculative_algorithm=None, speculative_dspark_block_size=None)
    sizes = resolving_view(args).cuda_graph_config.decode.bs
    assert set(specs.WIDTHS) & set(range(max(sizes) + 1)) <= set(sizes)


def test_without_amd_kernels_that_is_the_reason_and_the_only_one(checkpoint) -> None:
    (line,) = refusal(checkpoint("v41-flash"))
    assert line.startswith("[116] the installed kernel library makes no model on amd")


# What is asked for, and what each of these lines must say.
REFUSED = {
    "tp 3": (
        dict(tp_size=3),
        ["tp_size 3 is not one of", "[102] tp_size is 3;", "[105] vocab_size is 129280;"],
    ),
    "expert parallel": (
        dict(ep_size=2),
        ["expert parallelism is in use", "[109] expert parallel is in use;"],
    ),
    "torch compile": (dict(enable_torch_compile=True), ["[109] torch compile is in use;"]),
    "watchdog of 8 s": (
        dict(watchdog_timeout=8.0),
        ["--watchdog-timeout 8 s leaves", "[106] watchdog_timeout is 8 s;"],
    ),
    "another dtype": (dict(dtype="float16"), ["dtype 'float16' is not one of ['bfloat16']"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernels_cannot_do_is_refused(case, checkpoint, kernels_there) -> None:
    asked, wanted = REFUSED[case]
    lines = refusal(checkpoint("v41-flash"), **asked)
    for words in wanted:
        assert any(words in line for line in lines), (words, lines)


class Changed:
    """Resolved settings with some others."""

    def __init__(self, cfg, **changes):
        self.cfg, self.changes = cfg, changes

    def __getattr__(self, name):
        return self.changes[name] if name in self.changes else getattr(self.cfg, name)


def reasons_of(checkpoint, **changes):
    """As resolution asks, of settings that SGLang itself may refuse earlier or never leave."""
    args = served.resolve(checkpoint, enable_nvidia_megakernel=False)
    _, reasons = binding.monokernel_disable_reasons(
        cfg=Changed(resolving_view(args), **changes),
        model_config=model_config_of(args),
        isa=binding.device_isa(),
    )
    return reasons


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(page_size=64), "[106] page_size is 64; these kernels need 256"),
        (dict(kv_cache_dtype="bfloat16"), "[106] kv_cache_dtype is bfloat16;"),
        (dict(attention_backend="triton"), "decode attention backend 'triton' is not one of"),
        (dict(speculative_algorithm="EAGLE"), "[106] speculative_algorithm is EAGLE;"),
        (
            dict(enable_deepseek_v4_fp4_indexer=True),
            "(change: leave out --enable-deepseek-v4-fp4-indexer)",
        ),
        (dict(enable_hisparse=True), "[109] hisparse is in use;"),
        (dict(enable_deterministic_inference=True), "needs a BITWISE spec"),
    ],
)
def test_other_settings_are_refused(changes, words, checkpoint, kernels_there) -> None:
    reasons = reasons_of(checkpoint("v4-flash"), **changes)
    assert any(words in line for line in reasons), reasons


def test_settings_of_the_weights_layout_do_not_matter(checkpoint, kernels_there) -> None:
    """Copies are from before SGLang lays anything out."""
    with envs.SGLANG_DSV4_FP4_DEQUANT.override(True):
        resolve(checkpoint("v41-flash"), moe_runner_backend="triton")


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("SGLANG_HACK_FLASHMLA_BACKEND", "unified_kv_triton", "unified_kv_triton"),
        ("SGLANG_HIP_DSV41_INDEX_K_PAGE8", True, "true"),
        ("SGLANG_DSPARK_DEFER_CONTEXT_KV", True, "true"),
    ],
)
def test_another_layout_or_order_of_the_cache_is_refused(
    name, value, seen, checkpoint, kernels_there
) -> None:
    with getattr(envs, name).override(value):
        lines = refusal(checkpoint("v41-flash"))
    assert any(line.startswith(f"[107] {name} is {seen};") for line in lines), lines


def test_every_setting_that_the_page_names_is_one_of_sglangs() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    text = (Path(__file__).parents[2] / "docs/amd.md").read_text()
    section = text[text.index("## Inside SGLang") : text.index("## What is shown")]
    named = set(re.findall(r"--[a-z][a-z0-9-]+", section))
    assert "--enable-amd-monokernel" in named and named <= known
    for variable in re.findall(r"\bSGLANG_\w+", section):
        assert hasattr(envs, variable), variable


@pytest.mark.parametrize(("isa", "words"), [(None, "no GPU is visible"), ("gfx90a", "on gfx90a")])
def test_another_gpu_is_refused(isa, words, amd_gpu, checkpoint) -> None:
    amd_gpu.isa = isa
    (line,) = refusal(checkpoint("v41-flash"))
    assert words in line


def test_caches_of_the_other_fp8_format_are_refused(amd_gpu, checkpoint, kernels_there) -> None:
    amd_gpu.isa = "gfx942"
    (line,) = refusal(checkpoint("v4-flash"))
    assert line.startswith("[111] SGLang writes its caches on gfx942 as e4m3fn and reads them as")


# What SGLang's header of fp8 conversions needs of the ones beside it, for a compiler of the host.
HEADERS = {
    "utils": """
        #include <cstdint>
        #include <cstring>
        #define SGL_DEVICE inline
        inline std::uint32_t __float_as_uint(float v) {
          std::uint32_t bits;
          std::memcpy(&bits, &v, 4);
          return bits;
        }
        inline float __uint_as_float(std::uint32_t bits) {
          float v;
          std::memcpy(&v, &bits, 4);
          return v;
        }""",
    "math": "#include <cmath>\nusing std::fmaxf;\nusing std::fminf;",
    "type": "#include <cstdint>\nusing fp8x2_e4m3_t = std::uint16_t;\n"
    "inline constexpr float kFP8E4M3Max = 448.0f;",
}


def test_sglangs_caches_on_gfx942_are_written_in_one_format_and_read_in_another(
    tmp_path, monkeypatch
) -> None:
    """Why they are refused: what its kernel stores for 1, its own reading takes for 0.5."""
    package = Path(sglang.__file__).parent / "kernels"
    for name, text in HEADERS.items():
        header = tmp_path / "sgl_kernel" / f"{name}.cuh"
        header.parent.mkdir(exist_ok=True)
        header.write_text(f"#pragma once\n{text}\n")
    source = tmp_path / "store.cpp"
    source.write_text(
        "#define USE_ROCM\n#define __gfx942__ 1\n#include <sgl_kernel/utils.cuh>\n"
        f'#include "{package}/jit/include/sgl_kernel/deepseek_v4/fp8_utils.cuh"\n'
        "int main() { return sglang::deepseek_v4::fp8::cvt_float_to_fp8_e4m3(1.0f); }\n"
    )
    subprocess.run(
        ["c++", "-std=c++20", "-I", tmp_path, source, "-o", tmp_path / "store"],
        check=True,
        timeout=60,
    )
    code = torch.tensor([subprocess.run([tmp_path / "store"], timeout=10).returncode]).byte()
    assert code.view(torch.float8_e4m3fn).float() == 1
    part = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: part)
    monkeypatch.setattr(fp8_kernel, "_is_hip", True)
    monkeypatch.setattr(fp8_kernel, "is_fp8_fnuz", fp8_kernel.is_fp8_fnuz.__wrapped__)
    reader = runpy.run_path(str(package / "ops/attention/dsv4/dequant_k_cache.py"))
    assert code.view(reader["fp8_dtype"]).float() == 0.5


def test_both_flags_are_refused(gpu, checkpoint, kernels_there) -> None:
    lines = served.refusal(checkpoint("v41-flash"), enable_amd_monokernel=True)
    assert "--enable-amd-monokernel is also set; use one of the two" in lines


def test_another_release_is_refused_with_both_versions(checkpoint, monkeypatch) -> None:
    import sys

    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    monkeypatch.delitem(sys.modules, "lowlat.specs.amd")
    (line,) = refusal(checkpoint("v41-flash"))
    assert "[115] SGLang is 0.5.24; this plugin was made for 0.5.23" in line


def test_another_contract_is_refused(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(contract, "MONOKERNEL_API_VERSION", 2)
    (line,) = refusal(checkpoint("v41-flash"))
    assert "uses monokernel API version 1; this SGLang requires version 2" in line


def test_the_numerics_are_a_bound_in_the_contracts_form() -> None:
    for spec in (specs.TARGET, specs.DRAFT):
        assert spec.numerics.kind is contract.NumericsKind.TOLERANCE
        for name in spec.numerics.bounds:
            launch, output, metric = name.split(".")
            assert launch and output and metric == "rel"


# ------------------------------------------------------------------ copies


@pytest.fixture(params=NAMES)
def config(request):
    return served.hf_config(_dispatch.built_in(request.param))


@pytest.fixture
def model(config):
    config.architectures = [ARCHITECTURE]
    return published.Loaded(config)


@pytest.fixture
def draft(config):
    config.architectures = [ARCHITECTURE]
    return published.LoadedDraft(config)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("part", ["model", "draft"])
def test_each_rank_copies_its_part_as_published(part, config, tp_size, request) -> None:
    """Names, dtypes and shapes are the kernels' on every rank, and the parts make the whole."""
    model, is_draft = request.getfixturevalue(part), part == "draft"
    keep = copying.keep_draft if is_draft else copying.keep
    weights, arrays = published.checkpoint_of(config, is_draft)
    wanted = published.tensors_of(config, tp_size, is_draft)
    parts = []
    for rank in range(tp_size):
        copies = {}
        with published.tp(tp_size, rank):
            for name, tensor in weights:
                seen = tensor.clone()
                keep(copies, model, name, seen)
                # What SGLang does to it afterwards.
                seen.view(torch.uint8).zero_()
        assert copying.reasons(copies, wanted) == []
        parts.append(copies)
    for spec in wanted:
        name = spec["name"]
        if spec["pool"] or copying.IN_PLACE.fullmatch(name):
            assert copying.copied(parts[0], name) is None
            continue
        shards = [published.raw(copying.copied(copies, name)) for copies in parts]
        dim = spec["shard_dim"]
        joined = shards[0] if dim < 0 else np.concatenate(shards, dim)
        assert joined.tobytes() == arrays[name].tobytes(), name


def test_tensors_of_other_parts_are_left_alone(model) -> None:
    copies = {}
    shared = ("embed.weight", "head.weight", "vision.patch.weight")
    for name in (*shared, "mtp.0.attn.wq_a.weight"):
        copying.keep(copies, model, name, torch.zeros(2))
    context = ("mtp.0.main_proj.weight", "mtp.0.main_norm.weight", "mtp.2.confidence_head.proj")
    for name in (*shared, *context, "layers.0.attn.wq_a.weight", "norm.weight"):
        copying.keep_draft(copies, model, name, torch.zeros(2))
    assert copies == {}


def test_a_split_that_does_not_divide_names_the_tensor(model) -> None:
    with (
        published.tp(4),
        pytest.raises(RefusalError, match=r"^\[112\] layers.0.attn.wq_b.weight has 6 in dim"),
    ):
        copying.keep({}, model, "layers.0.attn.wq_b.weight", torch.zeros(6, 4))


def test_sglangs_own_writer_leaves_index_keys_where_the_kernels_read_them(tmp_path) -> None:
    (told,) = served.ranks("split_index.py", tmp_path, 1, WRITER_BUDGET_S)
    assert told == {"codes": True, "scales": True, "written": 160}


# ------------------------------------------------------------------ install


@pytest.fixture
def install(monkeypatch, amd_gpu, kernels_there, config):
    """Loads published weights and installs a spec of ours, all by SGLang; gives capture hooks."""
    holder = SimpleNamespace(SPEC=None)
    monkeypatch.setitem(__import__("sys").modules, "lowlat_test_spec", holder)
    registry = {contract.BACKEND: {ARCHITECTURE: "lowlat_test_spec:SPEC"}}
    monkeypatch.setattr(contract, "_REGISTRY", registry)

    def run(model, open_kernels=served.Kernels, *, weights=None, **more):
        is_draft = isinstance(model, published.LoadedDraft)
        holder.SPEC = published.spec_of(open_kernels, is_draft, **more)
        weights = published.checkpoint_of(config, is_draft)[0] if weights is None else weights
        list(binding.monokernel_weights_iterator(model=model, weights=weights))
        hooks = []
        binding.install_monokernel_forward(model=model, hf_config=config, capture_tail_hooks=hooks)
        return hooks

    return run


def serving(**more):
    """A server's published settings with the AMD flag."""
    return served.server(enable_nvidia_megakernel=False, enable_amd_monokernel=True, **more)


def built_of():
    return __import__("sys").modules["lowlat_test_spec"].SPEC.build.built[-1]


def ids(rows):
    return torch.arange(rows)


def step(model, mode, size, rows=None):
    rows = size * served.ROWS if rows is None else rows
    batch = served.batch(mode, size)
    batch.input_ids = ids(rows)
    return model.forward(ids(rows), ids(rows), batch)


def capture(model, gpu, hooks, sizes=(1, 2, 4)):
    """As SGLang captures: the largest size first, and its hooks behind each."""
    gpu.capturing = True
    for size in sorted(sizes, reverse=True):
        step(model, "TARGET_VERIFY", size)
        batch = served.batch("TARGET_VERIFY", size)
        batch.input_ids = ids(size * served.ROWS)
        for hook in hooks:
            hook(SimpleNamespace(capture_bs=list(sizes)), None, batch, 0)
    gpu.capturing = False


def test_the_build_gets_its_context_and_copies_as_published(install, model) -> None:
    with serving():
        install(model)
        request = built_of().kernels.request
    assert request.widths == (6, 12, 24)  # of the captured sizes 1, 2 and 4
    assert (request.mode, request.tokens_per_request) == ("target_verify", 6)
    assert request.expert_layout == "row_major" and request.wait_budget_ns == 48_000_000_000
    assert copying.reasons(request.copies, published.tensors_of(model.config)) == []
    parameters = dict(model.named_parameters())
    for name, tensor in request.tensors.items():
        assert tensor.data_ptr() == parameters[name].data_ptr(), name


def test_a_server_without_speculation_decodes_every_width_that_is_captured(install, model) -> None:
    with serving(draft=False, capture_bs=(1, 2, 12)):
        install(model)
        request = built_of().kernels.request
    assert (request.mode, request.widths) == ("decode", (1, 2, 12))


def test_the_log_says_what_was_built_and_what_the_copies_take(install, model, caplog) -> None:
    with caplog.at_level(logging.INFO), serving():
        install(model)
    assert "lowlat: target_verify steps of 6, 12, 24 rows built in" in caplog.text
    assert "weight copies: experts (" in caplog.text and ", weights (" in caplog.text


def test_live_weight_updates_are_refused(install, model) -> None:
    with serving():
        install(model)
    assert "Online weight updates are not supported" in model._derived_weight_cache_error


def test_a_slice_of_a_gpu_is_refused(install, model, amd_gpu) -> None:
    amd_gpu.blocks = 64
    with serving(), pytest.raises(ValueError, match="partitioned GPUs: 64 compute units"):
        install(model)


def test_a_load_that_shows_no_tensors_is_refused(install, model) -> None:
    with serving(), pytest.raises(ValueError) as told:
        install(model, weights=[])
    assert str(told.value) == (
        f"{FLAG}: rank 0: [110] no tensor of the checkpoint was seen while the weights loaded"
        " (change: --load-format auto)"
    )


def test_every_difference_of_the_copies_is_told(install, model, config) -> None:
    weights, _ = published.checkpoint_of(config)
    changed = []
    for name, tensor in weights:
        if name == "layers.0.attn.q_norm.weight":
            continue
        if name == "layers.0.attn.kv_norm.weight":
            tensor = tensor.float()
        if name == "layers.1.attn.attn_sink":
            tensor = tensor[:1]
        if name == "layers.1.ffn.experts.2.w1.weight":
            continue
        changed.append((name, tensor))
    with serving(), pytest.raises(ValueError) as told:
        install(model, weights=changed)
    lines = str(told.value).removeprefix(f"{FLAG}: ").split("; rank 0: ")
    for words in (
        "[110] layers.0.attn.q_norm.weight is not loaded",
        "[111] dtype of layers.0.attn.kv_norm.weight is f32; these kernels need bf16",
        "[112] shape of layers.1.attn.attn_sink is [1]",
        f"[110] layers.1.ffn.experts.w1.weight is of {config.n_routed_experts - 1} experts",
    ):
        assert any(words in line for line in lines), (words, lines)
    assert len(lines) == 4


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("device lost")])
def test_whatever_goes_wrong_in_a_build_is_a_refusal(install, model, error) -> None:
    def fails(request):
        raise error

    with serving(), pytest.raises(RefusalError, match=r"rank 0: \[501\] \w+: (no room|dev)"):
        install(model, fails)


def test_the_librarys_own_refusal_is_the_builds(install, model, monkeypatch) -> None:
    says = _dispatch.decline("kernels_missing", "none here", "install one")
    with (
        serving(),
        pytest.raises(RefusalError, match=r"rank 0: \[116\] none here \(change: install one\)"),
    ):
        monkeypatch.setattr(guard, "kernels_reasons", lambda platform: [says])
        install(model, build.amd_kernels, model_disable_reasons=lambda *_: [])


# ------------------------------------------------------------------ steps and capture


def test_routed_steps_run_our_kernels_and_sglangs_head(install, model) -> None:
    with serving():
        install(model)
        out = step(model, "TARGET_VERIFY", 2)
        built = built_of()
    (ours,) = built.kernels.steps
    assert (ours.mode, ours.rows, model.ran) == ("target_verify", 12, 0)
    head = model.logits_processor.given
    assert torch.equal(head.hidden[:, 0].float(), ids(12).float())
    assert torch.equal(head.hidden_states_before_norm, head.hidden * 2)
    assert out.shape == (12, model.lm_head.weight.shape[0])
    assert built.report()["covered"] == 1


@pytest.mark.parametrize(
    ("mode", "size", "rows"),
    [("EXTEND", 1, 40), ("IDLE", 0, 0), ("DECODE", 1, 1), ("TARGET_VERIFY", 3, 18)],
)
def test_other_steps_run_sglangs_forward(install, model, mode, size, rows) -> None:
    with serving():
        install(model)
        assert step(model, mode, size, rows) == "SGLang's own"
    assert built_of().kernels.steps == [] and model.ran == 1


def test_given_embeddings_run_sglangs_forward(install, model) -> None:
    with serving():
        install(model)
        batch = served.batch("TARGET_VERIFY", 1)
        batch.input_ids = ids(6)
        out = model.forward(ids(6), ids(6), batch, input_embeds=torch.zeros(6, 8))
    assert out == "SGLang's own" and built_of().kernels.steps == []


def test_the_signature_that_graph_runners_inspect_is_kept(install, model) -> None:
    import inspect

    with serving():
        install(model)
    assert "input_embeds" in inspect.signature(model.forward).parameters


def test_another_attention_backend_is_refused_at_the_first_step(install, model) -> None:
    backend = served.Backend()
    backend.decode_attention_backend_str = "triton"
    with serving(backend=backend):
        install(model)
        with pytest.raises(ValueError, match="this runner's is 'triton'"):
            step(model, "TARGET_VERIFY", 1)


def test_the_schedule_that_our_steps_never_read_is_not_built(install, model) -> None:
    unread = contract.StepMetadata.LOW_RATIO_DECODE_SCHEDULE
    with serving():
        install(model)
    for size, skipped in ((2, True), (3, False)):
        batch = served.batch("TARGET_VERIFY", size)
        batch.input_ids = ids(size * served.ROWS)
        assert binding.is_metadata_unread(model, batch, unread) is skipped


def test_captured_sizes_are_told(install, model, amd_gpu, caplog) -> None:
    with serving(), caplog.at_level(logging.INFO):
        capture(model, amd_gpu, install(model))
    assert "runs target_verify steps of batch size [1, 2, 4] x 6 tokens (3 of 3" in caplog.text


def test_sizes_that_no_width_covers_are_refused(install, model) -> None:
    with serving(capture_bs=(16, 32)), pytest.raises(ValueError, match="has no width for this"):
        install(model)


def test_a_cache_that_moved_after_the_capture_is_a_fault(install, model, amd_gpu) -> None:
    with serving() as backend:
        capture(model, amd_gpu, install(model))
        backend.token_to_kv_pool.swa = torch.zeros(4, 64, dtype=torch.uint8)
        with pytest.raises(RefusalError, match=r"^\[405\] target_verify 1 x 6 rows .* swa.0 uint8"):
            step(model, "TARGET_VERIFY", 1)
        # It never runs again.
        assert step(model, "TARGET_VERIFY", 1) == "SGLang's own"


# ------------------------------------------------------------------ the draft


def attach(draft):
    """The target's modules, as SGLang's worker gives them to a draft."""
    draft.embed_tokens = draft.lm_head = SimpleNamespace(weight=torch.zeros(4, 8))


def block(model, size, rows=served.GAMMA, **more):
    batch = served.batch("TARGET_VERIFY", size)
    batch.input_ids = ids(rows * size)
    return model.forward(ids(rows * size), ids(rows * size), batch, **more)


def test_a_drafts_build_gets_a_blocks_rows_and_its_own_copies(install, draft, caplog) -> None:
    with caplog.at_level(logging.INFO), serving():
        install(draft)
        request = built_of().kernels.request
    assert (request.mode, request.tokens_per_request, request.stages) == ("draft", 5, True)
    assert request.widths == (5, 10, 20)  # of the captured sizes 1, 2 and 4
    assert copying.reasons(request.copies, published.tensors_of(draft.config, draft=True)) == []
    assert all(name.startswith("mtp.") for _, name in request.copies)
    assert "weight copies: experts (" in caplog.text


def test_a_block_that_samples_behind_its_anchor_has_a_row_more(install, draft) -> None:
    draft.sample_from_anchor = False
    with serving():
        install(draft)
    assert built_of().kernels.request.tokens_per_request == 6


def test_blocks_run_our_layers_once_sglang_has_attached_the_targets_modules(install, draft) -> None:
    with serving():
        install(draft)
        assert block(draft, 2) == "SGLang's own"
        attach(draft)
        out = block(draft, 2)
        (ours,) = built_of().kernels.steps
        assert (ours.mode, ours.rows, draft.ran) == ("target_verify", 10, 1)
        assert torch.equal(out.hidden_states[:, 0].float(), ids(10).float())
        assert out.next_token_logits is None
        for given in (
            dict(size=3),
            dict(size=2, rows=6),
            dict(size=2, input_embeds=torch.zeros(10, 8)),
        ):
            assert block(draft, **given) == "SGLang's own", given
    assert len(built_of().kernels.steps) == 1


def test_a_drafts_captured_sizes_are_told(install, draft, amd_gpu, caplog) -> None:
    attach(draft)
    with serving(), caplog.at_level(logging.INFO):
        hooks = install(draft)
        amd_gpu.capturing = True
        for size in (4, 2, 1):
            block(draft, size)
            batch = served.batch("TARGET_VERIFY", size)
            batch.input_ids = ids(size * served.GAMMA)
            for hook in hooks:
                hook(SimpleNamespace(capture_bs=[1, 2, 4]), None, batch, 0)
    assert "runs target_verify steps of batch size [1, 2, 4] x 5 tokens (3 of 3" in caplog.text


def test_a_draft_whose_weights_did_not_pass_by_is_refused(install, draft, config) -> None:
    weights, _ = published.checkpoint_of(config, draft=True)
    rest = [(name, tensor) for name, tensor in weights if not name.endswith("attn.wkv.scale")]
    with serving(), pytest.raises(ValueError, match=r"\[110\] mtp.0.attn.wkv.scale is not loaded"):
        install(draft, weights=rest)


def test_drafts_of_more_requests_than_the_kernels_take_are_refused(install, draft) -> None:
    settings = dict(capture_bs=(12,), speculative_num_draft_tokens=2)
    with serving(**settings), pytest.raises(RefusalError, match="more than 8 requests alone"):
        install(draft)
