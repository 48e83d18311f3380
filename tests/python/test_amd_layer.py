"""One tiny layer of V4.1 and of V4 on two ranks of the platform amd: the library's own host side,
the launches K1, K2i, K2, head and draft as it makes them, and their machine code for gfx942 and
gfx950, run by our interpreter behind the HIP runtime's C ABI (tests/tools/amd/hip.py). It never ran
on an AMD GPU.
"""

import contextlib
import ctypes

import numpy as np
import pytest
from lowlat import _kernels
from support import amd_machine as amd
from support import amd_model, small_model
from support import kernels_abi as abi

MODELS = {"v41": amd_model.TINY_V41, "v4": amd_model.TINY_V4}
SEED, STEP_SEED = 5, 3


@pytest.fixture(scope="module")
def library():
    """The kernel library, with code objects. The interpreter is loaded before it asks for HIP."""
    path = abi.find_library()
    if path is None:
        pytest.skip("no kernel library: set LOWLAT_KERNELS or install the package")
    try:
        amd.compiler()
    except amd.NoToolsError as error:
        pytest.skip(str(error))
    if b"amdgcn-amd-amdhsa--gfx950" not in path.read_bytes():
        pytest.skip("the kernel library was built without a compiler for AMD code objects")
    return path


def hosted_or_skip():
    if "amd" not in _kernels.model_refusal("none"):
        pytest.skip("the installed lowlat has no AMD code objects: install it with LOWLAT_HIP=ON")


RUNS = [("gfx950", "v41", 1), ("gfx942", "v4", 1)]
if amd.DEEP:
    RUNS = [(isa, model, seed) for isa in amd.ISAS for model in MODELS for seed in (1, 2, 3)]


@pytest.mark.parametrize("isa, model, seed", RUNS)
def test_a_tiny_layer_of_two_ranks_is_near_scalar_s(library, isa, model, seed):
    """Products go in the matrix unit's order. Ranks are equal to the bit, and so are a draft's
    tokens."""
    small = MODELS[model]
    weights = small_model.Weights(small, SEED, 2)
    machine = amd.machine.Machine(isa, ranks=2, seed=seed, approximate=3)
    scalar = abi.Group(library, small.config, 2, weights.shard)
    with amd.hip.Runtime(machine, num_units=2) as runtime:
        group = amd_model.AmdGroup(runtime, library, weights)
        runs = [amd_model.Steps(one, small.config, STEP_SEED) for one in (group, scalar)]
        for mode, counts in ((abi.EXTEND, (5, 4)), (abi.DECODE, (1, 1))):
            logits, want = (one.step(mode, counts) for one in runs)
            assert np.array_equal(logits[0].view(np.uint32), logits[1].view(np.uint32))
            amd_model.check_logits_near(logits[0], want[0])
        drafts, want = (one.draft() for one in runs)
        for tokens, _ in drafts:
            assert np.array_equal(tokens, want[0][0])
        assert np.array_equal(drafts[0][1].view(np.uint32), drafts[1][1].view(np.uint32))
        amd_model.check_logits_near(drafts[0][1], want[0][1])
        for rank in range(2):
            for name, pool in scalar.pools[rank].items():
                amd_model.check_near(name, group.pools[rank][name], pool)
        group.close()
    scalar.close()


@pytest.mark.parametrize("isa, model, seed", RUNS)
def test_a_tiny_layer_inside_an_engine_is_near_scalar_s(library, isa, model, seed):
    """A hosted model: the engine's caches, page 0 for padding, V4.1's index keys in split pages.
    Few of the outputs are another bf16, because products and sums over a row go in other orders."""
    hosted_or_skip()
    small = MODELS[model]
    machine = amd.machine.Machine(isa, ranks=1, seed=seed, approximate=3)
    scalar = amd_model.Hosted("scalar", small, SEED, np.copy)
    with amd.hip.Runtime(machine, num_units=2) as runtime:
        device = amd_model.device_memory(runtime)
        with contextlib.closing(amd_model.Hosted("amd:0", small, SEED, device)) as hosted:
            for first in (0, 4):
                outs, wanted = (one.step(first, STEP_SEED + first) for one in (hosted, scalar))
                assert runtime.failure is None, runtime.failure
                for name, want in wanted.items():
                    amd_model.check_places(name, outs[name], want)
                    assert not (want == 0x7FC0).any() and want.any(), name
            for name, pool in scalar.pools.items():
                amd_model.check_near(name, hosted.pools[name], pool)


def test_a_graph_that_is_replayed_after_an_abort_leaves_no_number(library):
    """The same launches again, as a graph makes them without the host: hidden states are NaN, and
    no cache changes."""
    hosted_or_skip()
    machine = amd.machine.Machine("gfx950", ranks=1, seed=1)
    launched = []

    class Recorded(amd.hip.Runtime):
        def launch(self, function, device, sizes, lds, arguments, count):
            given = ctypes.string_at(arguments, count)
            launched.append((function, device, list(sizes[0:6]), lds, given))
            return super().launch(function, device, sizes, lds, arguments, count)

    with Recorded(machine, num_units=2) as runtime:
        place = amd_model.device_memory(runtime)
        with contextlib.closing(amd_model.Hosted("amd:0", MODELS["v41"], SEED, place)) as hosted:
            launched.clear()
            hosted.step(0, STEP_SEED)
            step, hidden = list(launched), hosted.out["hidden"]
            assert len(step) == 4 and not (hidden == 0x7FC0).any()
            hosted.model.abort()
            hidden[...] = 0xABCD
            before = {name: pool.copy() for name, pool in hosted.pools.items()}
            for function, device, sizes, lds, given in step:
                buffer = ctypes.create_string_buffer(given, len(given))
                arguments = ctypes.addressof(buffer)
                assert runtime.launch(function, device, sizes, lds, arguments, len(given)) == 0
            machine.run(limit=100_000_000)
            assert (hidden == 0x7FC0).all()
            for name, pool in hosted.pools.items():
                assert np.array_equal(pool, before[name]), name


def test_a_rank_that_does_not_come_is_a_fault_that_names_it(library):
    """The other rank's step is never launched: the wait ends at its deadline and says for whom."""
    small = amd_model.TINY_V41
    budget = {"wait_budget_ns": 2_000_000}
    config = small.config | budget
    weights = small_model.Weights(
        small_model.SmallModel(config, small.lengths, small.larger, small.entry_size), SEED, 2
    )
    machine = amd.machine.Machine("gfx950", ranks=2, seed=1)
    with amd.hip.Runtime(machine, num_units=2) as runtime:
        group = amd_model.AmdGroup(runtime, library, weights)
        steps = amd_model.Steps(group, config, STEP_SEED)

        def only_the_first(function, structs):
            group.must(function(group.models[0], ctypes.byref(structs[0]), None))
            wait = ctypes.c_uint64(amd_model.WAIT_BUDGET_S * 1_000_000_000)
            return group.lib.lowlat_synchronize(group.models[0], wait)

        group.launch = only_the_first
        steps.step(abi.EXTEND, (2, 2))
        words = amd_model.status(group, 0)
        assert words.state == 1 and words.peer == 1
        group.close()
