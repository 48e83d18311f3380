"""SGLang's install, dispatch and capture check, over our builds with kernels that stand in."""

import logging
from types import SimpleNamespace

import pytest
import served
import torch
from lowlat import _dispatch, build, guard
from lowlat.kernels import HostedKernels
from lowlat.reasons import NUMBERS, RefusalError
from sglang.kernels.plugin_kernels.nvidia import spec as contract
from sglang.srt.kernel_plugins.nvidia import binding

ARCHITECTURE = "LowlatTestForCausalLM"
NAMES = ("tiny-v4", "tiny-v41")


@pytest.fixture(params=NAMES)
def config(request):
    return served.hf_config(_dispatch.built_in(request.param))


@pytest.fixture
def model(config):
    return served.Model(served.table(config, engram_rows(config)).target())


def engram_rows(config):
    return {idx: 50 + idx for idx in getattr(config, "engram_layer_ids", ())}


@pytest.fixture
def install(monkeypatch, gpu, kernels_there, config):
    """Installs a spec of ours through SGLang's own registry; gives the capture hooks."""
    gpu.isa = served.ISA
    holder = SimpleNamespace(SPEC=None)
    monkeypatch.setitem(__import__("sys").modules, "lowlat_test_spec", holder)
    monkeypatch.setitem(contract._REGISTRY, ARCHITECTURE, "lowlat_test_spec:SPEC")
    config.architectures = [ARCHITECTURE]

    def run(model, spec=None, *, is_draft=False):
        holder.SPEC = spec or served.spec(served.Kernels)
        hooks = []
        binding.install_megakernel(
            model=model, hf_config=config, capture_tail_hooks=hooks, is_draft=is_draft
        )
        return hooks

    return run


def ids(rows):
    return torch.arange(rows)


def capture(model, gpu, sizes=(1, 2, 4)):
    """As SGLang captures: the largest size first."""
    gpu.capturing = True
    for size in sorted(sizes, reverse=True):
        rows = size * served.ROWS
        model.forward(ids(rows), ids(rows), served.batch("TARGET_VERIFY", size))
    gpu.capturing = False


def check_captured(hooks, sizes=(1, 2, 4)):
    for hook in hooks:
        hook(SimpleNamespace(capture_bs=list(sizes)), None, None, 0)


# ------------------------------------------------------------------ build


def test_the_build_gets_its_context_and_binds_in_place(install, model) -> None:
    with served.server():
        install(model)
        built = binding.built_megakernel(model)
    request = built.kernels.request
    assert built.widths == request.widths == tuple(6 * n for n in range(1, 9))
    assert (request.mode, request.tokens_per_request) == ("target_verify", 6)
    # 60 s at most, and our waits end before that.
    assert request.wait_budget_ns == 48_000_000_000
    parameters = dict(model.named_parameters())
    assert parameters.keys() == request.tensors.keys()
    for name, tensor in request.tensors.items():
        assert tensor.data_ptr() == parameters[name].data_ptr(), name


def test_a_server_without_speculation_decodes(install, model) -> None:
    with served.server(draft=False):
        install(model)
        built = binding.built_megakernel(model)
    assert built.widths == tuple(range(1, 9))
    assert built.kernels.request.mode == "decode"


def test_the_log_says_what_was_built(install, model, caplog) -> None:
    with caplog.at_level(logging.INFO), served.server():
        install(model)
    assert (
        "lowlat: target_verify steps of 6, 12, 18, 24, 30, 36, 42, 48 rows built in" in caplog.text
    )
    assert "3.0 MiB of our own beside the weights" in caplog.text
    assert "NVIDIA megakernel: active (lowlat-test: tiny, weights in place" in caplog.text


def test_live_weight_updates_are_refused_and_the_state_dict_is_the_models(install, model) -> None:
    before = set(model.state_dict())
    with served.server():
        install(model)
    assert "Online weight updates are not supported" in model._derived_weight_cache_error
    assert set(model.state_dict()) == before


def test_a_second_install_is_refused(install, model) -> None:
    with served.server():
        install(model)
        with pytest.raises(ValueError, match="already replaced on this instance"):
            install(model)


def test_a_slice_of_a_gpu_is_refused(install, model, gpu) -> None:
    gpu.blocks = 66
    needs = contract.Requirements(
        isas=frozenset({served.ISA}), tp_sizes=frozenset({1}), resident_blocks=132
    )
    with served.server(), pytest.raises(ValueError, match="partitioned GPUs: 66 SMs"):
        install(model, served.spec(served.Kernels, requires=needs))


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("device lost")])
def test_whatever_goes_wrong_in_a_build_is_a_refusal(install, model, error) -> None:
    def fails(request):
        raise error

    with served.server(), pytest.raises(RefusalError, match=r"rank 0: \[501\] \w+: (no room|dev)"):
        install(model, served.spec(fails))


def test_weights_that_the_kernels_cannot_read_name_a_cure_that_a_server_has() -> None:
    """What only the values show: the words are the library's."""

    def ready():
        raise ValueError("3 values of attn.wo_a.weight are\nno e4m3 values")

    kernels = object.__new__(HostedKernels)
    kernels.model = SimpleNamespace(ready=ready)
    with pytest.raises(RefusalError) as told:
        kernels.become_ready()
    assert told.value.lines == [
        f"[{NUMBERS['tensor_layout']}] 3 values of attn.wo_a.weight are no e4m3 values"
        " (change: the published checkpoint)"
    ]


def test_today_the_nvidia_build_is_refused_in_one_line(install, model) -> None:
    guard_says = _dispatch.decline("kernels_missing", "none here", "install one")
    with (
        served.server(),
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RefusalError, match=r"rank 0: \[116\] none here \(change: install one\)"),
    ):
        patch.setattr(guard, "kernels_reasons", lambda *_: [guard_says])
        spec = served.spec(build.nvidia_kernels, reasons=None)
        install(model, spec)


# ------------------------------------------------------------------ loaded model


def names_of(model, ending):
    return next(name for name, _ in model.named_parameters() if name.endswith(ending))


def test_every_difference_of_the_loaded_model_is_told(install, model) -> None:
    layer = model.model.layers[0]
    layer.hc_attn_base = torch.nn.Parameter(torch.zeros(24, dtype=torch.bfloat16), False)
    del layer.self_attn.q_norm.weight
    wide = torch.zeros(2 * layer.self_attn.kv_norm.weight.shape[0], dtype=torch.bfloat16)
    layer.self_attn.kv_norm.weight = torch.nn.Parameter(wide[::2], False)
    layer.self_attn.attn_sink = torch.nn.Parameter(torch.zeros(3), False)
    with served.server(), pytest.raises(ValueError) as told:
        install(model)
    lines = str(told.value).split("\n  - ")[1:]
    prefix = "rank 0: "
    assert [line[len(prefix) : len(prefix) + 5] for line in lines] == [
        "[111]",
        "[112]",
        "[110]",
        "[113]",
    ]
    assert "dtype of model.layers.0.hc_attn_base is bf16; these kernels need f32" in lines[0]
    assert "shape of model.layers.0.self_attn.attn_sink is [3]" in lines[1]
    assert "model.layers.0.self_attn.q_norm.weight is not loaded" in lines[2]
    assert "layout of model.layers.0.self_attn.kv_norm.weight is strided" in lines[3]


def test_experts_that_another_method_laid_out_are_refused_with_the_flag(install, model) -> None:
    class Mxfp4FlashinferCutlassMoEMethod:
        pass

    model.model.layers[1].mlp.experts.quant_method = Mxfp4FlashinferCutlassMoEMethod()
    with served.server(), pytest.raises(ValueError) as told:
        install(model)
    lines = str(told.value).split("\n  - ")[1:]
    assert len(lines) == 4  # codes and scales of both products
    for line in lines:
        assert "[113] layout of model.layers.1.mlp.experts.w" in line
        assert "is Mxfp4FlashinferCutlassMoEMethod; these kernels need marlin" in line
        assert "(change: --moe-runner-backend marlin)" in line


# ------------------------------------------------------------------ steps


def test_covered_steps_run_our_kernels_and_sglangs_head(install, model) -> None:
    with served.server():
        install(model)
        rows = 2 * served.ROWS
        given = served.batch("TARGET_VERIFY", 2)
        out = model.forward(ids(rows), ids(rows), given)
    built = binding.built_megakernel(model)
    (step,) = built.kernels.steps
    assert (step.mode, step.rows, model.ran) == ("target_verify", rows, 0)
    assert step.view.kv_pool.pool is not None
    head = model.logits_processor.given
    assert torch.equal(head.hidden[:, 0].float(), ids(rows).float())
    assert head.metadata is given and head.aux is None
    assert torch.equal(head.hidden_states_before_norm, head.hidden * 2)
    assert out.shape == (rows, model.lm_head.weight.shape[0])


def test_auxiliary_hidden_states_reach_the_head_without_the_other(install, model) -> None:
    class WithAux(served.Kernels):
        def step(self, *args):
            out = super().step(*args)
            return served.StepOutput(out.hidden, [out.hidden], out.before_norm)

    with served.server():
        install(model, served.spec(WithAux))
        model.forward(ids(6), ids(6), served.batch("TARGET_VERIFY", 1))
    head = model.logits_processor.given
    assert len(head.aux) == 1 and head.hidden_states_before_norm is None


UNCOVERED = [
    ("EXTEND", 1, 40, "step_is_extend"),
    ("MIXED", 2, 40, "step_is_mixed"),
    ("IDLE", 0, 0, "step_is_idle"),
    ("DRAFT_EXTEND_V2", 1, 6, "step_is_extend"),
    ("DECODE", 1, 1, "mode_not_captured"),
    ("TARGET_VERIFY", 9, 54, "batch_too_large"),
    ("TARGET_VERIFY", 2, 11, "rows_ragged"),
]


@pytest.mark.parametrize(("mode", "size", "rows", "reason"), UNCOVERED)
def test_other_steps_run_sglangs_forward_counted_and_told_once(
    install, model, caplog, mode, size, rows, reason
) -> None:
    with served.server(), caplog.at_level(logging.INFO, logger="lowlat.reasons"):
        install(model)
        for _ in range(3):
            out = model.forward(ids(rows), ids(rows), served.batch(mode, size))
            assert out == "SGLang's own"
    built = binding.built_megakernel(model)
    assert built.kernels.steps == [] and model.ran == 3
    assert built.report()["uncovered_by_reason"] == {reason: 3}
    (line,) = [record.message for record in caplog.records]
    assert f"[{NUMBERS[reason]}]" in line and f"{size} requests, {rows} rows" in line


def test_given_embeddings_are_not_ours(install, model) -> None:
    with served.server():
        install(model)
        embeds = torch.zeros(6, 8)
        out = model.forward(ids(6), ids(6), served.batch("TARGET_VERIFY", 1), input_embeds=embeds)
    assert out == "SGLang's own" and binding.built_megakernel(model).kernels.steps == []


def test_the_signature_that_graph_runners_inspect_is_kept(install, model) -> None:
    import inspect

    with served.server():
        install(model)
    assert "input_embeds" in inspect.signature(model.forward).parameters


# ------------------------------------------------------------------ capture


def test_captured_sizes_are_told(install, model, gpu, caplog) -> None:
    with served.server(), caplog.at_level(logging.INFO):
        hooks = install(model)
        capture(model, gpu)
        check_captured(hooks)
    assert "runs the decode graphs of batch sizes [1, 2, 4] (3 of 3)" in caplog.text


def test_a_runner_whose_graphs_are_all_too_large_is_refused(install, model, gpu) -> None:
    sizes = (16, 32)
    with served.server(capture_bs=sizes):
        hooks = install(model)
        capture(model, gpu, sizes)
        with pytest.raises(ValueError, match="none of the 2 captured decode graphs"):
            check_captured(hooks, sizes)


def prefill(model):
    return model.forward(ids(40), ids(40), served.batch("EXTEND", 1))


def test_what_stayed_in_place_after_a_capture_is_no_fault(install, model, gpu) -> None:
    with served.server():
        install(model)
        capture(model, gpu)
        assert prefill(model) == "SGLang's own"


def test_a_cache_that_moved_after_the_capture_is_a_fault(install, model, gpu) -> None:
    with served.server() as backend:
        install(model)
        capture(model, gpu)
        backend.token_to_kv_pool.swa = torch.zeros(4, 64, dtype=torch.uint8)
        with pytest.raises(RefusalError, match=r"^\[405\] target_verify 1 x 6 rows .* swa.0 uint8"):
            prefill(model)
        # It never runs again.
        assert model.forward(ids(6), ids(6), served.batch("TARGET_VERIFY", 1)) == "SGLang's own"


def test_a_weight_that_moved_after_the_capture_is_a_fault(install, model, gpu) -> None:
    with served.server():
        install(model)
        capture(model, gpu)
        norm = model.model.norm.weight
        model.model.norm.weight = torch.nn.Parameter(norm.clone(), False)
        with pytest.raises(RefusalError, match=r"^\[405\] .* sealed model.norm.weight bfloat16"):
            prefill(model)


def test_another_pool_object_is_found_by_sglang_itself(install, model, gpu) -> None:
    with served.server() as backend:
        hooks = install(model)
        capture(model, gpu)
        backend.token_to_kv_pool = served.Pool()
        with pytest.raises(RuntimeError, match="kv_pool was reallocated"):
            check_captured(hooks)
