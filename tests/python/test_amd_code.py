"""The code objects of the platform amd hold what they are written for, and take what is planned.

No AMD GPU is needed, and none was ever used: this reads what the compiler made. What the code
objects do when they are executed is the interpreter's business (tests/tools/amd).
"""

import re
from pathlib import Path

import pytest
from support import amd_tools
from support.amd_tools import Kernel, NoToolsError, kernels_of, parts_of

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY = (ROOT / "cpp_kernels/host/amd/geometry.hpp").read_text(encoding="utf-8")
# As the host launches them: registers, bytes of LDS, private bytes of a lane.
PLANS = {
    name: tuple(eval(number, {}) for number in numbers.split(","))
    for name, numbers in re.findall(r'\{"(lowlat_\w+)", ([\d*, ]+)\}', GEOMETRY)
}
# What the compiler keeps in a lane's memory because it is indexed at run time.
STAGES_WITH_ARRAYS = {"lowlat_stage_pooled_key": 256, "lowlat_stage_index_key_fp8": 256}
PARTS = pytest.mark.parametrize("arch", amd_tools.ARCHITECTURES)

# Lanes that each poll a word of their own and leave when it came, and what the schedule does: all
# look, and leave together. (One lane of a wave that polls alone shows when the code is executed.)
PLANTED = """
#include "platform/amd.hpp"
namespace plat = lowlat::amd::plat;
LOWLAT_KERNEL(256) lowlat_each_lane(const std::uint32_t* word, std::uint32_t* out) {
  while (plat::load_poll<plat::Scope::system>(word + plat::thread_idx()) == 0u) plat::spin_pause();
  out[plat::thread_idx()] = 1u;
}
LOWLAT_KERNEL(256) lowlat_all_lanes(const std::uint32_t* word, std::uint32_t* out) {
  while (plat::warp_ballot(
             plat::load_poll<plat::Scope::system>(word + plat::thread_idx()) == 0u) != 0u) {
    plat::spin_pause();
  }
  out[plat::thread_idx()] = 1u;
}
LOWLAT_KERNEL(256) lowlat_indexed(const int* at, float* out) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = out[i];
  for (int i = 0; i < 100; ++i) values[at[i]] += 1.0f;
  for (int i = 0; i < 64; ++i) out[i] = values[i];
}
"""


def kernels(name: str, arch: str) -> dict[str, Kernel]:
    try:
        code = amd_tools.code_object(name, arch)
    except NoToolsError as error:
        pytest.skip(str(error))
    return kernels_of(code.with_suffix(".s").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    folder = tmp_path_factory.mktemp("planted")
    source = folder / "planted.hip"
    source.write_text(PLANTED, encoding="utf-8")
    try:
        code = amd_tools.compiled(source, "gfx950", folder)
    except NoToolsError as error:
        pytest.skip(str(error))
    return kernels_of(code.with_suffix(".s").read_text(encoding="utf-8"))


def lines(kernel: Kernel) -> list[str]:
    return [line for part in parts_of(kernel) for line in part.code]


def loops_where_lanes_leave(kernel: Kernel) -> list[str]:
    """Loops that wait (they sleep) and whose lanes may leave one by one: the lanes that are done
    are taken out of exec, and the loop goes on with the rest."""
    parts = parts_of(kernel)
    polls = {part.loop for part in parts if any(c.startswith("s_sleep") for c in part.code)}
    assert None not in polls, "a sleep outside a loop"
    return sorted(
        str(part.loop)
        for part in parts
        if part.loop in polls and any(re.match(r"s_andn2_b64 exec, exec", c) for c in part.code)
    )


@PARTS
def test_the_schedule_is_within_its_plan(arch: str) -> None:
    found = kernels("step", arch)
    assert set(found) == set(PLANS)
    for name, kernel in found.items():
        registers, lds, private = PLANS[name]
        facts = kernel.facts
        assert facts["wavefront_size"] == 64
        assert facts["max_flat_workgroup_size"] == 256
        assert facts["vgpr_spill_count"] == 0, name
        assert facts["vgpr_count"] <= registers, (name, facts["vgpr_count"])
        assert facts["group_segment_fixed_size"] <= lds, name
        assert facts["private_segment_fixed_size"] <= private, name
        # Nothing is called: arguments would go through memory.
        assert not [line for line in lines(kernel) if line.startswith("s_swappc")], name


@PARTS
def test_no_stage_spills(arch: str) -> None:
    for name, kernel in kernels("stages", arch).items():
        assert kernel.facts["vgpr_spill_count"] == 0, name
        assert kernel.facts["vgpr_count"] <= 256, name
        private = STAGES_WITH_ARRAYS.get(name, 0)
        assert kernel.facts["private_segment_fixed_size"] <= private, name


def product_loops(kernel: Kernel) -> dict[str, list[str]]:
    """The code of the loops that hold products of the matrix unit and no other loop."""
    found = {}
    for part in parts_of(kernel):
        if part.loop == part.label and any(line.startswith("v_mfma") for line in part.code):
            found[part.label] = part.code
    return found


# Loops over weights of each kernel, one of each use of a product. None elsewhere.
PRODUCT_LOOPS = {
    **dict.fromkeys(("lowlat_target_front", "lowlat_draft_front"), 8),
    **dict.fromkeys(("lowlat_target_back", "lowlat_draft_back"), 8),
    **dict.fromkeys(("lowlat_target_head", "lowlat_draft_propose", "lowlat_propose"), 1),
    "lowlat_draft_inject": 2,
}


# Instructions of those loops for 64 weights, by kind, as the time model of docs/amd.md counts them;
# and weights of a lane that an instruction of the unit multiplies.
LOOP_COSTS = {
    "gfx942": {"fp4": 3.75, "fp8": 4.7, "bf16": 2.2},
    "gfx950": {"fp4": 1.45, "fp8": 1.95, "bf16": 2.05},
}
WEIGHTS_OF_A_PRODUCT = {"gfx942": 4, "gfx950": 8}


def weights_of(code: list[str]) -> str:
    if any(re.search(r"_pk_(bf16|f32)_fp8", line) for line in code):
        return "fp8"
    return "fp4" if any(re.search(r"_fp4 |v_pk_add_u16", line) for line in code) else "bf16"


@PARTS
def test_loops_of_products_are_as_long_as_the_model_says(arch: str) -> None:
    seen = set()
    for name, kernel in kernels("step", arch).items():
        for loop, code in product_loops(kernel).items():
            num_products = sum(line.startswith("v_mfma") for line in code)
            kind = weights_of(code)
            cost = len(code) / (WEIGHTS_OF_A_PRODUCT[arch] * num_products)
            assert cost <= LOOP_COSTS[arch][kind], (name, loop, kind, cost)
            seen.add(kind)
    assert seen == {"bf16", "fp4", "fp8"}


@PARTS
def test_products_are_the_matrix_unit_s(arch: str) -> None:
    """A loop over weights holds its instructions, whose sums stay in vector registers: nothing is
    moved from or to accumulators, nothing is in private memory, and no wait in it is for all that
    was asked for. What multiplies weights with a vector instruction is the Markov head alone."""
    for name, kernel in kernels("step", arch).items():
        loops = product_loops(kernel)
        assert len(loops) >= PRODUCT_LOOPS.get(name, 0), (name, len(loops))
        assert bool(loops) == (name in PRODUCT_LOOPS), name
        for loop, code in loops.items():
            assert not [one for one in code if re.match(r"scratch_|v_accvgpr|ds_", one)], (
                name,
                loop,
            )
            waits = [int(n) for one in code for n in re.findall(r"vmcnt\((\d+)\)", one)]
            assert waits and min(waits) >= 8, (name, loop, waits)
        if name in PRODUCT_LOOPS:
            assert without(lines(kernel), SCHEDULE_PRODUCTS[arch][:1]) == [], name
        if name.endswith("_back"):
            assert without(lines(kernel), SCHEDULE_PRODUCTS[arch]) == [], name


@PARTS
def test_loops_that_touch_private_memory_read_no_weights(arch: str) -> None:
    """What is indexed at run time is the pooling of V4's keys and the words of a packet."""
    for name, kernel in kernels("step", arch).items():
        parts = parts_of(kernel)
        touches = re.compile(r"scratch_(load|store)_")
        touching = {p.loop for p in parts if p.loop and any(map(touches.match, p.code))}
        reads_codes = {p.loop for p in parts if any("load_ubyte" in c for c in p.code)}
        assert not touching & (reads_codes | set(product_loops(kernel))), name
        assert sum(bool(touches.match(c)) for p in parts for c in p.code) <= 28, name


@PARTS
def test_waits_are_made_by_whole_waves(arch: str) -> None:
    for name in ("step", "stages"):
        num_waiting = 0
        for kernel in kernels(name, arch).values():
            assert loops_where_lanes_leave(kernel) == [], kernel.name
            num_waiting += any(line.startswith("s_sleep") for line in lines(kernel))
        assert num_waiting >= {"step": 8, "stages": 2}[name]


@PARTS
def test_every_wait_reads_the_clock(arch: str) -> None:
    """A wait has a deadline: a kernel with a sleep has as many reads of the clock, one before the
    loop and one inside."""
    for kernel in kernels("step", arch).values():
        parts = parts_of(kernel)
        polls = {p.loop for p in parts if any(c.startswith("s_sleep") for c in p.code)}
        for poll in polls:
            code = [c for p in parts if p.loop == poll for c in p.code]
            assert any(c.startswith("s_memrealtime") for c in code), (kernel.name, poll)


# What the schedule's kernels must hold, and the stages' between them.
PACKETS = (
    r"global_store_dwordx4 .* sc0 sc1",
    r"global_load_dwordx4 .* sc0 sc1",
)
ORDER = (
    r"buffer_wbl2 sc1",  # release, device
    r"buffer_inv sc1",  # acquire, device
    r"buffer_wbl2 sc0 sc1",  # release, system: abort and status words
    r"s_memrealtime",
    r"s_sleep",
    r"s_barrier",
)
# Of the schedule: the product, the expansion of e4m3 and, in K2, that of fp4.
SCHEDULE_PRODUCTS = {
    "gfx942": (r"v_mfma_f32_16x16x16_bf16 ", r"v_cvt_pk_f32_fp8", r"v_pk_add_u16 .* 0.5"),
    "gfx950": (
        r"v_mfma_f32_16x16x32_bf16 ",
        r"v_cvt_scalef32_pk_bf16_fp8",
        r"v_cvt_scalef32_pk_bf16_fp4",
    ),
}
# Of the platform, in the stages' kernels.
PRODUCTS = {
    "gfx942": (r"v_mfma_f32_16x16x16_bf16", r"v_mfma_f32_16x16x32_fp8_fp8"),
    "gfx950": (
        r"v_mfma_f32_16x16x32_bf16",
        r"v_mfma_f32_16x16x32_fp8_fp8",
        r"v_mfma_scale_f32_16x16x128_f8f6f4",
    ),
}


def without(code: list[str], wanted: tuple[str, ...]) -> list[str]:
    return [one for one in wanted if not any(re.match(one, line) for line in code)]


@PARTS
def test_the_instructions_that_must_be_there_are(arch: str) -> None:
    found = kernels("step", arch)
    for name in ("target_front", "target_back", "target_head", "draft_front", "draft_back"):
        code = lines(found[f"lowlat_{name}"])
        assert without(code, PACKETS + ORDER) == [], name
    # K2i exchanges nothing.
    assert without(lines(found["lowlat_target_select"]), ORDER) == []
    stages = [line for kernel in kernels("stages", arch).values() for line in lines(kernel)]
    assert without(stages, PRODUCTS[arch]) == []


WRITES = re.compile(r"\t(?!\w*store|ds_write|\w*atomic)\w+ v(?:(\d+)|\[(\d+):(\d+)\]),")


def written(line: str) -> range:
    """The vector registers that an instruction writes."""
    if not (found := WRITES.match(line)):
        return range(0)
    first = int(found[1] or found[2])
    return range(first, int(found[1] or found[3]) + 1)


def early_loads(kernel: Kernel) -> int:
    """How many of the bytes that are kept over a wait for others were asked for before it: what
    last wrote the register is a load, and the wait, a loop that sleeps, is between the two."""
    count = 0
    for at, line in enumerate(kernel.code):
        if not (kept := re.search(r"; kept v(\d+)", line)):
            continue
        before = range(at - 1, 0, -1)
        wait = next(i for i in before if "s_sleep" in kernel.code[i])
        writer = next(i for i in before if int(kept[1]) in written(kernel.code[i]))
        count += "_load_ubyte " in kernel.code[writer] and writer < wait
    return count


@PARTS
def test_weights_are_asked_for_before_the_wait_for_others(arch: str) -> None:
    """Four lines of a weight row a lane. K1: before its two projections; K2: before both parts of
    the o-projection, the router or shared expert, and the shared expert's last; the head before the
    logits. K2i reads no weights."""
    found = kernels("step", arch)
    for name, hand_offs in {
        "target_front": 2,
        "target_back": 4,
        "target_head": 1,
        "draft_front": 2,
        "draft_back": 4,
        "draft_propose": 1,
    }.items():
        assert early_loads(found[f"lowlat_{name}"]) == 4 * hand_offs, name
    assert early_loads(found["lowlat_target_select"]) == 0


@PARTS
def test_packets_travel_whole(arch: str) -> None:
    """Nothing of the system's scope is written but packets of 16 bytes and single words."""
    for kernel in kernels("step", arch).values():
        for line in lines(kernel):
            if re.match(r"(global|flat)_store_\w+ .*sc0 sc1", line):
                assert re.match(r"global_store_dwordx4 |(global|flat)_store_dword ", line), line


@PARTS
def test_parameters_lie_where_the_host_puts_them(arch: str) -> None:
    """Pointer, pointer, int, the call by value, and of a layer's kernels an int."""
    for name, kernel in kernels("step", arch).items():
        if name == "lowlat_probe":
            assert kernel.arguments == [(0, 8), (8, 4)]
            continue
        assert kernel.arguments[:3] == [(0, 8), (8, 8), (16, 4)], name
        offset, size = kernel.arguments[3]
        assert offset == 24 and size % 8 == 0, name
        of_layer = re.search(r"front|select|back", name)
        assert kernel.arguments[4:] == ([(24 + size, 4)] if of_layer else []), name


def test_lanes_that_leave_a_wait_one_by_one_are_found(planted: dict[str, Kernel]) -> None:
    assert loops_where_lanes_leave(planted["lowlat_each_lane"]) != []
    assert loops_where_lanes_leave(planted["lowlat_all_lanes"]) == []


def test_a_plain_access_and_private_memory_are_found(planted: dict[str, Kernel]) -> None:
    code = lines(planted["lowlat_all_lanes"])
    assert without(code, PACKETS) == list(PACKETS)
    facts = planted["lowlat_indexed"].facts
    assert facts["private_segment_fixed_size"] + facts["group_segment_fixed_size"] > 0


def test_every_plan_is_of_a_kernel_that_the_host_launches() -> None:
    host = (ROOT / "cpp_kernels/host/amd/step.cpp").read_text(encoding="utf-8")
    host += (ROOT / "cpp_kernels/host/amd/hip.cpp").read_text(encoding="utf-8")
    assert set(re.findall(r'"(lowlat_\w+)"', host)) == set(PLANS)


@PARTS
def test_rocm_6_loads_it(arch: str) -> None:
    """Code objects of version 5, for this part alone."""
    kernels("step", arch)
    text = amd_tools.code_object("step", arch).with_suffix(".s").read_text(encoding="utf-8")
    assert f'.amdgcn_target "amdgcn-amd-amdhsa--{arch}"' in text
    assert ".amdhsa_code_object_version 5" in text


def test_the_wheel_s_compiler_is_the_tests() -> None:
    """LOWLAT_PIP_HIP fetches what these tests were run with."""
    assert amd_tools.amd_compile.PACKAGE in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
