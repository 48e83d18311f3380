"""What a draft's build hooks in SGLang: the listing of a block's attention data asks no GPU."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from lowlat import build, unwaited
from sglang.kernels.ops.attention.dsv4 import attn_metadata_kernels
from sglang.srt.layers.attention import deepseek_v4_backend as backends
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import ragged_verify

BLOCK, LENGTHS = 5, [300, 8192, 77]
Backend = backends.DeepseekV4AttnBackend
NAME = unwaited.DRAFT_LISTING.rsplit(".", 1)[1]
# Not by itself in a name of this module: the registry would put the hooked one there.
OWN = SimpleNamespace(listing=getattr(Backend, NAME))


class OnGpu(torch.Tensor):
    """Lengths that say they are on a GPU, and whose numbers nobody may ask for."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self):
        raise AssertionError("the host waits for the GPU")


@pytest.fixture
def build_drafts(monkeypatch):
    """Builds a draft, and another, over SGLang's class with `method`; as it was afterwards."""

    def make(method=OWN.listing):
        monkeypatch.setattr(Backend, NAME, method)
        for _ in range(2):
            assert build.draft(SimpleNamespace(sample_from_anchor=True), None, None) == "built"
        return getattr(Backend, NAME)

    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(build, "build_draft", lambda *_: "built")
    monkeypatch.setattr(build, "place", lambda _: SimpleNamespace(tp_size=1))
    unwaited.install.cache_clear()
    yield make
    unwaited.install.cache_clear()


@pytest.fixture
def hooked(build_drafts):
    return build_drafts()


def plainly(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value


def listed(method, lengths, host=None):
    """What SGLang's own method hands on to the listing of rows."""
    given = {}
    backend = SimpleNamespace(
        page_size=256,
        init_forward_metadata_prefill=lambda **more: given.update(more),
        _draft_block_extend_lens=lambda lens: lens,
    )
    method(
        backend,
        max_seq_len=16384,
        req_pool_indices=torch.arange(len(lengths)),
        seq_lens=lengths,
        seq_lens_cpu=host,
        out_cache_loc=torch.zeros(BLOCK * len(lengths)),
        block_size=BLOCK,
    )
    return given


def test_without_a_draft_of_ours_nothing_is_hooked() -> None:
    """The entry points have run here, as they do in a server without the flag."""
    assert unwaited.DRAFT_LISTING not in HookRegistry._hooks
    assert not hasattr(getattr(Backend, NAME), "__wrapped__")


def test_a_method_with_other_arguments_is_left_alone(build_drafts, caplog) -> None:
    def other(self, seq_lens):
        return seq_lens

    assert build_drafts(other) is other
    assert unwaited.DRAFT_LISTING not in HookRegistry._hooks
    assert caplog.messages == [
        f"lowlat: each draft waits for the GPU: {unwaited.DRAFT_LISTING} takes self, seq_lens;"
        " needed seq_lens and seq_lens_cpu"
    ]


def test_where_another_plugin_was_first_the_wait_stays(build_drafts, monkeypatch, caplog) -> None:
    monkeypatch.setattr(HookRegistry, "_patched", {unwaited.DRAFT_LISTING})
    assert build_drafts() is OWN.listing
    assert caplog.messages == [
        "lowlat: each draft waits for the GPU: SGLang hooks no more around"
        f" {unwaited.DRAFT_LISTING}"
    ]


def test_the_hook_is_there_once_and_says_whose_it_is(hooked) -> None:
    assert hooked.__wrapped__ is OWN.listing
    ((_, hook, source),) = HookRegistry._hooks[unwaited.DRAFT_LISTING]
    assert hook is unwaited.with_host_lengths
    assert (source.plugin_name, source.dist_name) == ("nvidia_megakernel", "lowlat")


def test_sglangs_own_listing_asks_the_gpu_and_hooked_it_does_not(hooked) -> None:
    lengths = torch.tensor(LENGTHS).as_subclass(OnGpu)
    with pytest.raises(AssertionError, match="waits for the GPU"):
        listed(OWN.listing, lengths)
    listed(hooked, lengths)


def test_what_it_hands_on_is_the_same_but_for_lengths_on_the_host(hooked) -> None:
    plain = listed(OWN.listing, torch.tensor(LENGTHS))
    ours = listed(hooked, torch.tensor(LENGTHS).as_subclass(OnGpu))
    assert plain.keys() == ours.keys()
    alike = {name: plainly(value) == plainly(ours[name]) for name, value in plain.items()}
    assert [name for name, same in alike.items() if not same] == ["seq_lens_cpu"]
    assert len(ours["seq_lens_cpu"]) == len(LENGTHS)


def test_lengths_that_sglang_has_are_handed_on(hooked) -> None:
    lengths = torch.tensor(LENGTHS).as_subclass(OnGpu)
    given = listed(hooked, lengths, torch.tensor(LENGTHS))
    assert given["seq_lens_cpu"] == [length + BLOCK for length in LENGTHS]
    # Where no GPU is asked nothing changes.
    given = listed(hooked, torch.tensor(LENGTHS))
    assert given["seq_lens_cpu"] == [length + BLOCK for length in LENGTHS]


def test_on_a_gpu_nothing_reads_lengths_of_the_host(monkeypatch) -> None:
    """They reach the rows' lengths alone, whose kernel is given the tensors and the rows' number;
    the uniform lengths before it come from the tensor and from how many requests there are."""
    given = {}
    monkeypatch.setattr(
        attn_metadata_kernels,
        "expand_prefill_causally_triton",
        lambda **more: given.update(more),
    )
    arguments = dict(
        req_pool_indices=1,
        seq_lens=2,
        extend_seq_lens=3,
        extend_start_loc=4,
        num_tokens=5,
        padded_num_tokens=6,
    )
    attn_metadata_kernels.ExpandPrefillCausally.triton(
        **arguments, seq_lens_cpu=[1], extend_seq_lens_cpu=[1]
    )
    assert not [name for name in given if name.endswith("_cpu")]
    lengths = torch.tensor(LENGTHS)
    made = [
        ragged_verify.compute_uniform_extend_lengths(
            seq_lens=lengths, seq_lens_cpu=host, extend_len=BLOCK
        )
        for host in (LENGTHS, [1, 1, 1])
    ]
    for one in made:
        assert torch.equal(one.seq_lens_extended, lengths + BLOCK)
        assert one.extend_seq_lens_cpu == [BLOCK] * len(LENGTHS)
        assert one.num_tokens == BLOCK * len(LENGTHS)
    # Of the listing's own text: where the numbers go, so that another use of them shows here.
    text = inspect.getsource(Backend.init_forward_metadata_prefill)
    uses = [line.strip() for line in text.splitlines() if "seq_lens_cpu" in line]
    uses = [line for line in uses if "extend_seq_lens_cpu" not in line]
    assert set(uses) <= {
        "seq_lens_cpu: List[int],",
        "seq_lens=seq_lens_cpu,",
        "seq_lens_cpu=seq_lens_cpu,",
        "seq_lens_cpu=None,",
    }
