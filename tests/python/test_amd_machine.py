"""The machine that runs AMD code objects: what it promises of memory, waits and schedules, and that
it finds what breaks the rules. Kernels are written in assembly, right first and then with one line
left out or changed.
"""

import struct

import numpy as np
import pytest
from support import amd_machine as amd

U32 = np.uint32
SEEDS = range(200 if amd.DEEP else 24)
LIMIT, PATIENCE = 400_000, 50_000

# A sender stays until the reader is done: a kernel's end would publish all that it wrote.
STAY = """
  v_mov_b32 v8, 0
stay:
  s_sleep 1
  global_load_dword v9, v8, s[10:11] sc0 sc1
  s_waitcnt vmcnt(0)
  v_cmp_ne_u32 vcc, 1, v9
  s_cbranch_vccnz stay
"""
END = """
  s_waitcnt vmcnt(0)
  v_mov_b32 v8, 0
  v_mov_b32 v9, 1
  global_store_dword v8, v9, s[10:11] sc0 sc1
"""
# Rank 0: 64 words of data, then the flag. Arguments: data, flag, done.
SEND = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_load_dwordx2 s[10:11], s[0:1], 0x10
  v_lshlrev_b32 v1, 2, v0
  v_add_u32 v2, 100, v0
  v_mov_b32 v3, 0
  v_mov_b32 v4, 7
  s_waitcnt lgkmcnt(0)
  global_store_dword v1, v2, s[4:5]
  buffer_wbl2 sc0 sc1
  s_waitcnt vmcnt(0)
  global_store_dword v3, v4, s[6:7] sc0 sc1
"""
# Rank 1 has looked at the data before; arguments: data, flag, done, out.
RECEIVE = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_load_dwordx2 s[10:11], s[0:1], 0x10
  s_load_dwordx2 s[8:9], s[0:1], 0x18
  v_lshlrev_b32 v1, 2, v0
  v_mov_b32 v3, 0
  s_waitcnt lgkmcnt(0)
  global_load_dword v5, v1, s[4:5]
  s_waitcnt vmcnt(0)
poll:
  s_sleep 1
  global_load_dword v4, v3, s[6:7] sc0 sc1
  s_waitcnt vmcnt(0)
  v_cmp_ne_u32 vcc, 7, v4
  s_cbranch_vccnz poll
  buffer_inv sc0 sc1
  global_load_dword v2, v1, s[4:5]
  s_waitcnt vmcnt(0)
  global_store_dword v1, v2, s[8:9]
"""
# Packets of three words and a tag, one a lane. Arguments: boxes, done; of the reader also out.
SEND_PACKETS = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_load_dwordx2 s[10:11], s[0:1], 0x8
  v_lshlrev_b32 v1, 4, v0
  v_add_u32 v4, 100, v0
  v_add_u32 v5, 200, v0
  v_add_u32 v6, 300, v0
  v_mov_b32 v7, 9
  s_waitcnt lgkmcnt(0)
  global_store_dwordx4 v1, v[4:7], s[4:5] sc0 sc1
"""
RECEIVE_PACKETS = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_load_dwordx2 s[10:11], s[0:1], 0x8
  s_load_dwordx2 s[6:7], s[0:1], 0x10
  v_lshlrev_b32 v1, 4, v0
  s_waitcnt lgkmcnt(0)
poll:
  s_sleep 1
  global_load_dwordx4 v[4:7], v1, s[4:5] sc0 sc1
  s_waitcnt vmcnt(0)
  v_cmp_ne_u32 vcc, 9, v7
  s_cbranch_vccnz poll
  global_store_dwordx4 v1, v[4:7], s[6:7]
"""
# Wave 0 writes LDS, wave 1 reads it. Arguments: out.
LDS = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_and_b32 v1, 63, v0
  v_lshlrev_b32 v1, 2, v1
  v_lshrrev_b32 v2, 6, v0
  v_readfirstlane_b32 s6, v2
  s_cmp_lg_u32 s6, 0
  s_cbranch_scc1 after
  v_add_u32 v3, 5, v0
  ds_write_b32 v1, v3
after:
  s_waitcnt lgkmcnt(0)
  s_barrier
  s_cmp_eq_u32 s6, 0
  s_cbranch_scc1 done
  ds_read_b32 v4, v1
  s_waitcnt lgkmcnt(0)
  global_store_dword v1, v4, s[4:5]
done:
"""
COUNT = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_mov_b32 v1, 0
  v_mov_b32 v2, 1
  s_waitcnt lgkmcnt(0)
  global_atomic_add v3, v1, v2, s[4:5] sc0{scope}
  s_waitcnt vmcnt(0)
  v_lshlrev_b32 v3, 2, v3
  v_mov_b32 v4, 1
  global_store_dword v3, v4, s[6:7]
"""
# Adds 1 to every word; arguments: words.
INCREMENT = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_lshlrev_b32 v1, 2, v0
  s_waitcnt lgkmcnt(0)
  global_load_dword v2, v1, s[4:5]
  s_waitcnt vmcnt(0)
  v_add_u32 v2, 1, v2
  global_store_dword v1, v2, s[4:5]
"""
# One thread waits for a word and hands it to its block, then a second section of one thread ends
# the loop with no barrier between it and the wait: LLVM sends the other lanes on without it.
ONE_LANE_POLL = """
typedef __UINT32_TYPE__ u32;
#define DEVICE __attribute__((device)) inline
extern "C" __attribute__((global, amdgpu_flat_work_group_size(256, 256))) void
one_lane_poll(const u32* bell, u32* done, float* sums) {
  __attribute__((shared)) static u32 ticket;
  const int thread = static_cast<int>(__builtin_amdgcn_workitem_id_x());
  u32 seen = 0;
  const auto barrier = [] {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  };
  const auto poll = [&] {
    u32 v;
    while ((v = __hip_atomic_load(bell, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)) == seen)
      __builtin_amdgcn_s_sleep(1);
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
    return v;
  };
  for (;;) {
#ifdef WHOLE_WAVE
    if (__builtin_amdgcn_readfirstlane(thread / 64) == 0) {
      const u32 v = __builtin_amdgcn_readfirstlane(poll());
      if (thread == 0) ticket = v;
    }
#else
    if (thread == 0) ticket = poll();
#endif
    barrier();
    seen = ticket;
    if (seen == 0xffffffffu) return;
    sums[thread] += static_cast<float>(seen);
    barrier();
    if (thread == 0)
      __hip_atomic_store(done, seen, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
  }
}
"""


@pytest.fixture(scope="module", params=amd.ISAS)
def isa(request):
    try:
        amd.compiler()
    except amd.NoToolsError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture(scope="module")
def load(isa, tmp_path_factory):
    """Loads a kernel of a body on one rank of a machine."""
    folder, made = tmp_path_factory.mktemp(isa), {}

    def one(machine, body, rank=0, name="kernel", lds_bytes=0):
        text = f'.amdgcn_target "amdgcn-amd-amdhsa--{isa}"\n.amdhsa_code_object_version 6\n'
        text += amd.kernel_text(name, body, lds_bytes)
        if text not in made:
            made[text] = amd.assembled(text, isa, folder)
        return machine.load(made[text], rank)

    return one


def launch(machine, code, buffers, grid=1, block=64, name="kernel"):
    given = struct.pack(f"<{len(buffers)}Q", *(one.address for one in buffers))
    machine.launch(code, name, grid, block, given)


def outcome(body):
    """None, or what the machine found."""
    try:
        body()
    except amd.machine.MachineError as error:
        return str(error)
    return None


def without(text, line):
    assert line in text
    return text.replace(line, "", 1)


def instead(text, line, other):
    assert line in text
    return text.replace(line, other, 1)


# ------------------------------------------------------------------ waits


@pytest.mark.parametrize(
    "body, register",
    [
        ("s_load_dwordx2 s[4:5], s[0:1], 0x0\n s_mov_b32 s6, s4", "s4 read"),
        (
            "s_load_dwordx2 s[4:5], s[0:1], 0x0\n v_mov_b32 v1, 0\n s_waitcnt lgkmcnt(0)\n"
            "global_load_dword v2, v1, s[4:5]\n v_add_u32 v3, v2, v2",
            "v2 read",
        ),
        (
            "s_load_dwordx2 s[4:5], s[0:1], 0x0\n v_mov_b32 v1, 0\n s_waitcnt lgkmcnt(0)\n"
            "global_load_dword v2, v1, s[4:5]\n v_mov_b32 v2, 0",
            "v2 written",
        ),
        (
            "s_load_dwordx2 s[4:5], s[0:1], 0x0\n v_mov_b32 v1, 0\n s_waitcnt lgkmcnt(0)\n"
            "global_load_dword v2, v1, s[4:5]\n global_load_dword v3, v1, s[4:5] offset:4\n"
            "s_waitcnt vmcnt(1)\n v_mov_b32 v4, v2\n v_mov_b32 v4, v3",
            "v3 read",
        ),
        ("v_mov_b32 v1, 0\n ds_read_b32 v2, v1\n v_mov_b32 v3, v2", "v2 read"),
    ],
)
def test_a_register_used_before_its_load_came_back_is_found(isa, load, body, register):
    machine = amd.machine.Machine(isa)
    code = load(machine, body, lds_bytes=256)
    launch(machine, code, [machine.array(np.zeros(4, U32), "words")])
    said = outcome(machine.run)
    assert said and register in said and "s_waitcnt" in said, said


# ------------------------------------------------------------------ memory between ranks


def flag_protocol(isa, load, send, receive, seed):
    """What the reader saw, or the machine's words."""
    machine = amd.machine.Machine(isa, ranks=2, seed=seed)
    data, flag = machine.array(np.zeros(64, U32), "data"), machine.array(np.zeros(1, U32), "flag")
    done, out = machine.array(np.zeros(1, U32), "done"), machine.poisoned((64,), U32, "out")
    launch(machine, load(machine, send + STAY, 0), [data, flag, done])
    launch(machine, load(machine, receive + END, 1), [data, flag, done, out])
    said = outcome(lambda: machine.run(LIMIT, PATIENCE))
    return said or out.read()


SENT = np.arange(100, 164, dtype=U32)


def test_a_flag_of_system_scope_carries_data_between_ranks(isa, load):
    for seed in SEEDS:
        assert np.array_equal(flag_protocol(isa, load, SEND, RECEIVE, seed), SENT), seed


FLAG_STORE = "global_store_dword v3, v4, s[6:7] sc0 sc1"
FLAG_LOAD = "global_load_dword v4, v3, s[6:7] sc0 sc1"


@pytest.mark.parametrize(
    "send, receive",
    [
        (instead(SEND, FLAG_STORE, FLAG_STORE[:-4]), RECEIVE),
        (instead(SEND, FLAG_STORE, FLAG_STORE[:-8]), RECEIVE),
        (instead(SEND, FLAG_STORE, FLAG_STORE[:-8] + " sc1"), RECEIVE),
        (SEND, instead(RECEIVE, FLAG_LOAD, FLAG_LOAD[:-4])),
    ],
    ids=["store-of-workgroup", "store-of-wave", "store-of-device", "load-of-workgroup"],
)
def test_a_flag_of_a_narrower_scope_never_arrives(isa, load, send, receive):
    found = [flag_protocol(isa, load, send, receive, seed) for seed in SEEDS]
    stuck = [one for one in found if isinstance(one, str)]
    assert stuck and all("no progress" in one for one in stuck)
    # A reader that looks before the flag is there keeps its copy; one that comes late is lucky.
    assert len(stuck) == len(found) or send == SEND


@pytest.mark.parametrize(
    "send, receive, always",
    [
        (without(SEND, "buffer_wbl2 sc0 sc1"), RECEIVE, True),
        (instead(SEND, "buffer_wbl2 sc0 sc1", "buffer_wbl2 sc1"), RECEIVE, True),
        (SEND, without(RECEIVE, "buffer_inv sc0 sc1"), False),
        (instead(SEND, f"s_waitcnt vmcnt(0)\n  {FLAG_STORE}", FLAG_STORE), RECEIVE, False),
    ],
    ids=["no-write-back", "write-back-to-the-device", "no-invalidate", "no-wait"],
)
def test_data_without_its_fence_is_seen_old(isa, load, send, receive, always):
    old = [
        not np.array_equal(flag_protocol(isa, load, send, receive, seed), SENT) for seed in SEEDS
    ]
    assert all(old) if always else any(old)


def packets(isa, load, send, seed):
    machine = amd.machine.Machine(isa, ranks=2, seed=seed)
    boxes = machine.array(np.zeros((64, 4), U32), "boxes")
    done, out = machine.array(np.zeros(1, U32), "done"), machine.poisoned((64, 4), U32, "out")
    launch(machine, load(machine, send + STAY, 0), [boxes, done])
    launch(machine, load(machine, RECEIVE_PACKETS + END, 1), [boxes, done, out])
    said = outcome(lambda: machine.run(LIMIT, PATIENCE))
    return said or out.read()


PACKETS = np.stack([SENT, SENT + 100, SENT + 200, np.full(64, 9, U32)], axis=1)


def test_a_16_byte_store_is_one_piece(isa, load):
    for seed in SEEDS:
        assert np.array_equal(packets(isa, load, SEND_PACKETS, seed), PACKETS), seed


STORE = "global_store_dwordx4 v1, v[4:7], s[4:5] sc0 sc1"


def test_a_packet_in_two_stores_is_seen_torn(isa, load):
    halves = "global_store_dwordx2 v1, v[4:5], s[4:5] sc0 sc1\n"
    halves += "  global_store_dwordx2 v1, v[6:7], s[4:5] offset:8 sc0 sc1"
    send = instead(SEND_PACKETS, STORE, halves)
    torn = [not np.array_equal(packets(isa, load, send, seed), PACKETS) for seed in SEEDS]
    assert any(torn)


@pytest.mark.parametrize(
    "other",
    [STORE[:-4], "global_store_dwordx3 v1, v[4:6], s[4:5] sc0 sc1"],
    ids=["no-sc1", "no-tag"],
)
def test_a_packet_that_is_not_published_is_no_progress(isa, load, other):
    said = packets(isa, load, instead(SEND_PACKETS, STORE, other), 1)
    assert isinstance(said, str) and "no progress" in said
    assert "rank 1 kernel kernel workgroup 0 wave 0" in said


@pytest.mark.parametrize("scope, ranks", [("", 1), (" sc1", 2)])
def test_atomics_count_every_lane_once(isa, load, scope, ranks):
    for seed in range(4):
        machine = amd.machine.Machine(isa, ranks=ranks, seed=seed)
        counter = machine.array(np.zeros(1, U32), "counter")
        marks = machine.array(np.zeros(64 * 6 * ranks, U32), "marks")
        for rank in range(ranks):
            code = load(machine, COUNT.format(scope=scope), rank)
            launch(machine, code, [counter, marks], grid=6)
        machine.run(LIMIT, PATIENCE)
        assert counter.read()[0] == 64 * 6 * ranks
        assert (marks.read() == 1).all()


def test_atomics_of_the_device_miss_another_ranks(isa, load):
    machine = amd.machine.Machine(isa, ranks=2, seed=1)
    counter = machine.array(np.zeros(1, U32), "counter")
    marks = machine.array(np.zeros(64 * 12, U32), "marks")
    for rank in range(2):
        launch(machine, load(machine, COUNT.format(scope=""), rank), [counter, marks], grid=6)
    machine.run(LIMIT, PATIENCE)
    assert counter.read()[0] < 64 * 12


def test_a_kernels_end_publishes_what_it_wrote(isa, load):
    machine = amd.machine.Machine(isa, seed=3)
    words = machine.array(np.arange(64, dtype=U32), "words")
    code = load(machine, INCREMENT)
    for _ in range(3):
        launch(machine, code, [words])
    machine.run(LIMIT, PATIENCE)
    assert np.array_equal(words.read(), np.arange(3, 67))


# ------------------------------------------------------------------ LDS and barriers


def lds(isa, load, body, seed):
    machine = amd.machine.Machine(isa, seed=seed)
    out = machine.poisoned((64,), U32, "out")
    launch(machine, load(machine, body, lds_bytes=256), [out], block=128)
    said = outcome(lambda: machine.run(LIMIT, PATIENCE))
    return said or out.read()


def test_lds_goes_from_wave_to_wave_over_a_barrier(isa, load):
    for seed in SEEDS:
        assert np.array_equal(lds(isa, load, LDS, seed), np.arange(5, 69)), seed


def test_lds_without_a_barrier_is_a_race(isa, load):
    said = [lds(isa, load, without(LDS, "s_barrier"), seed) for seed in SEEDS]
    assert any(isinstance(one, str) and "no barrier between" in one for one in said)


def test_a_barrier_before_the_write_has_landed_is_found(isa, load):
    body = without(LDS, "  s_waitcnt lgkmcnt(0)\n  s_barrier").replace(
        "after:\n", "after:\n  s_barrier\n", 1
    )
    said = [lds(isa, load, body, seed) for seed in SEEDS]
    assert any(isinstance(one, str) and "before an s_waitcnt" in one for one in said)


def test_a_barrier_that_a_wave_never_reaches_is_no_progress(isa, load):
    body = LDS.replace("after:\n", "after:\n  s_cbranch_scc1 after\n", 1)
    said = lds(isa, load, body, 1)
    assert "no progress" in said and "waits at a barrier" in said


# ------------------------------------------------------------------ bounds, unknown, schedules


@pytest.mark.parametrize(
    "line, words",
    [
        ("global_load_dword v2, v1, s[4:5] offset:256", "load of 4 bytes"),
        ("global_store_dword v1, v1, s[4:5] offset:-4", "outside of every allocation"),
        ("global_store_dword v1, v1, s[6:7]", "read only"),
        ("ds_write_b32 v1, v1 offset:256", "LDS byte 256"),
        ("scratch_store_dword off, v1, off offset:8", "scratch byte 8"),
        ("s_trap 2", "gave up"),
        ("v_lerp_u8 v2, v1, v1, v1", "not modelled"),
    ],
)
def test_what_a_kernel_may_not_do_names_its_place(isa, load, line, words):
    machine = amd.machine.Machine(isa)
    body = "s_load_dwordx4 s[4:7], s[0:1], 0x0\n v_mov_b32 v1, 0\n s_waitcnt lgkmcnt(0)\n"
    code = load(machine, f"{body}  {line}", lds_bytes=256)
    constant = machine.array(np.zeros(64, U32), "constant", read_only=True)
    launch(machine, code, [machine.array(np.zeros(64, U32), "words"), constant])
    said = outcome(machine.run)
    assert said and words in said, said
    assert "rank 0 kernel kernel workgroup (0, 0, 0) wave 0" in said
    assert line.split()[0] in said  # the instruction itself, disassembled


def test_a_run_is_repeated_by_its_seed(isa, load):
    def run(seed):
        machine = amd.machine.Machine(isa, ranks=2, seed=seed)
        data = machine.array(np.zeros(64, U32), "data")
        flag, done = (machine.array(np.zeros(1, U32), name) for name in ("flag", "done"))
        out = machine.poisoned((64,), U32, "out")
        launch(machine, load(machine, SEND + STAY, 0), [data, flag, done])
        launch(machine, load(machine, RECEIVE + END, 1), [data, flag, done, out])
        return machine.run(LIMIT, PATIENCE)

    counts = [run(seed) for seed in range(8)]
    assert counts == [run(seed) for seed in range(8)]
    assert len(set(counts)) > 1


def test_no_more_workgroups_run_than_are_resident(isa, load):
    """Two that wait for each other: with one at a time there is no end."""
    body = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  v_mov_b32 v1, 0
  v_mov_b32 v2, 1
  s_waitcnt lgkmcnt(0)
  s_mov_b64 exec, 1
  global_atomic_add v1, v2, s[4:5]
again:
  s_sleep 1
  global_load_dword v3, v1, s[4:5] sc1
  s_waitcnt vmcnt(0)
  v_cmp_ne_u32 vcc, 2, v3
  s_cbranch_vccnz again
"""
    for resident in (2, 1):
        machine = amd.machine.Machine(isa)
        counter = machine.array(np.zeros(1, U32), "counter")
        code = load(machine, body)
        given = struct.pack("<Q", counter.address)
        machine.launch(code, "kernel", 2, 64, given, resident=resident)
        said = outcome(lambda machine=machine: machine.run(LIMIT, PATIENCE))
        assert (said is None) == (resident == 2), said


def test_the_clock_moves_with_the_instructions(isa, load):
    body = """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_memrealtime s[6:7]
  s_waitcnt lgkmcnt(0)
  s_movk_i32 s8, 1000
again:
  s_sub_u32 s8, s8, 1
  s_cmp_lg_u32 s8, 0
  s_cbranch_scc1 again
  s_memrealtime s[10:11]
  s_waitcnt lgkmcnt(0)
  s_sub_u32 s10, s10, s6
  v_mov_b32 v1, 0
  v_mov_b32 v2, s10
  global_store_dword v1, v2, s[4:5]
"""
    machine = amd.machine.Machine(isa, ns_per_instruction=20.0)
    out = machine.poisoned((1,), U32, "out")
    launch(machine, load(machine, body), [out])
    machine.run(LIMIT, PATIENCE)
    # 3000 instructions of 20 ns, in ticks of 10 ns.
    assert 6000 <= out.read()[0] <= 6020


# ------------------------------------------------------------------ what a compiler made


def polled(isa, tmp_path, whole_wave):
    source = tmp_path / "one_lane_poll.hip"
    source.write_text(("#define WHOLE_WAVE\n" if whole_wave else "") + ONE_LANE_POLL)
    machine = amd.machine.Machine(isa, seed=1)
    code = machine.load(amd.compiled(source, isa, tmp_path))
    bell = machine.array(np.array([7], U32), "bell")
    done = machine.array(np.zeros(1, U32), "done")
    sums = machine.array(np.zeros(256, np.float32), "sums")
    machine.launch(code, "one_lane_poll", 1, 256, [bell, done, sums])
    said = outcome(lambda: machine.run(LIMIT, PATIENCE))
    return said, int(done.read()[0])


def test_a_poll_of_one_lane_that_was_compiled_into_a_hang_is_found(isa, tmp_path):
    said, done = polled(isa, tmp_path, whole_wave=False)
    # The work is never reported, and lane 0 is not among those that go round for ever.
    assert done == 0
    assert "no end" in said and "exec 0xfffffffffffffffe" in said


def test_the_same_poll_by_the_whole_wave_does_its_work(isa, tmp_path):
    said, done = polled(isa, tmp_path, whole_wave=True)
    assert done == 7
    # It waits for the next bell, which nobody rings.
    assert "no progress" in said
