"""A machine of one or more ranks that runs code objects, deterministic by its seed.

m = Machine("gfx950", ranks=2, seed=1)
code = m.load(code_object.read("k.hsaco"), rank=0)
out = m.array(np.zeros(64, np.float32), "out")
m.launch(code, "kernel", grid=4, block=256, arguments=[out, 64])
m.run()
out.read()
"""

import ctypes
import hashlib
import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import code_object, decode

HERE = Path(__file__).parent
BUILD_BUDGET_S = 900
FLAGS = ["-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-fPIC", "-shared"]
FLAGS += ["-Wl,-soname,libamdhip64.so.7"]  # see engine/hip.cpp
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
INSTRUCTION_LIMIT = 2_000_000_000
PATIENCE = 20_000_000
LINE_BYTES = 64
RESIDENT_BLOCKS = 304  # of a part: its compute units


class MachineError(RuntimeError):
    """A run that ended badly. `what` is the engine's line; the text adds place and instruction."""

    def __init__(self, what: str, place: str = "") -> None:
        super().__init__(f"{what}{place}")
        self.what = what


class LaunchText(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("rank", ctypes.c_int),
        ("code", ctypes.c_int),
        ("entry", ctypes.c_uint64),
        ("kernarg", ctypes.c_uint64),
        ("dispatch", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("lds_bytes", "scratch_bytes")),
        *((name, ctypes.c_uint32) for name in ("rsrc1", "rsrc2", "rsrc3", "properties")),
        *((name, ctypes.c_uint32) for name in ("dynamic_lds", "resident")),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
    )


class FaultPlace(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_int),
        ("offset", ctypes.c_uint32),
        ("rank", ctypes.c_int),
        ("workgroup", ctypes.c_uint32 * 3),
        ("wave", ctypes.c_uint32),
        ("exec", ctypes.c_uint64),
        ("kernel", ctypes.c_char * 256),
    )


# Called for an instruction that is met for the first time: the code's number and the offset.
DECODER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint32)


_INT, _POINTER = ctypes.c_int, ctypes.c_void_p


class HipFace(ctypes.Structure):
    """Face of engine/hip.cpp."""

    _fields_ = (
        ("machine", _POINTER),
        ("num_units", _INT),
        ("load", ctypes.CFUNCTYPE(_INT, _POINTER, _INT)),
        ("function", ctypes.CFUNCTYPE(_INT, _INT, ctypes.c_char_p)),
        (
            "launch",
            ctypes.CFUNCTYPE(
                *(_INT, _INT, _INT, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32),
                *(_POINTER, ctypes.c_uint64),
            ),
        ),
        ("run", ctypes.CFUNCTYPE(_INT, _INT)),
        ("error", ctypes.CFUNCTYPE(_POINTER)),
    )


def build_folder() -> Path:
    """Where the engine is built: LOWLAT_AMD_ENGINE, or build/ of the checkout."""
    named = os.environ.get("LOWLAT_AMD_ENGINE")
    return Path(named) if named else HERE.parents[2] / "build" / "amd-engine"


def build() -> Path:
    """The engine's library, built once for these sources."""
    sources = sorted((HERE / "engine").glob("*.[ch]pp"))
    compiler = os.environ.get("CXX", "c++")
    mark = hashlib.sha256()
    for part in (*FLAGS, compiler, *(source.read_bytes() for source in sources)):
        mark.update(part if isinstance(part, bytes) else part.encode())
    folder = build_folder()
    library = folder / f"engine-{mark.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    units = [str(source) for source in sources if source.suffix == ".cpp"]
    unfinished = folder / f"{library.name}.{os.getpid()}"
    command = [compiler, *FLAGS, *WARNINGS, *units, "-o", str(unfinished)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BUILD_BUDGET_S, check=False
    )
    if done.returncode != 0:
        raise MachineError(f"the engine does not build:\n{done.stderr}")
    unfinished.replace(library)
    return library


class Engine:
    """The C face."""

    _one: "Engine | None" = None

    def __init__(self) -> None:
        lib = ctypes.CDLL(str(build()))
        u64, pointer, text = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p
        faces = {
            "amd_last_error": (text, ()),
            "amd_num_fields": (ctypes.c_int, ()),
            "amd_field_name": (text, (ctypes.c_int,)),
            "amd_knows": (ctypes.c_int, (text,)),
            "amd_create": (pointer, (ctypes.c_int, ctypes.c_int, u64)),
            "amd_destroy": (None, (pointer,)),
            "amd_set": (None, (pointer, u64, ctypes.c_double, ctypes.c_int)),
            "amd_allocate": (u64, (pointer, u64, text, ctypes.c_int, ctypes.c_int)),
            "amd_free": (ctypes.c_int, (pointer, u64)),
            "amd_write": (ctypes.c_int, (pointer, u64, pointer, u64)),
            "amd_read": (ctypes.c_int, (pointer, u64, pointer, u64)),
            "amd_add_code": (ctypes.c_int, (pointer, u64, u64, DECODER)),
            "amd_add_instruction": (
                None,
                (pointer, ctypes.c_int, text, *[ctypes.c_uint32] * 2, ctypes.c_int, pointer),
            ),
            "amd_launch": (ctypes.c_int, (pointer, ctypes.POINTER(LaunchText))),
            "amd_run": (ctypes.c_int, (pointer, u64, u64, ctypes.POINTER(FaultPlace))),
            "amd_run_some": (
                ctypes.c_int,
                (pointer, ctypes.c_int, u64, u64, ctypes.POINTER(FaultPlace)),
            ),
            "amd_hip_attach": (None, (ctypes.POINTER(HipFace),)),
            "amd_instructions": (u64, (pointer,)),
        }
        for name, (result, arguments) in faces.items():
            face = getattr(lib, name)
            face.restype, face.argtypes = result, list(arguments)
        self.lib = lib
        count = lib.amd_num_fields()
        self.field_at = {lib.amd_field_name(i).decode(): i for i in range(count)}

    @classmethod
    def get(cls) -> "Engine":
        if cls._one is None:
            cls._one = cls()
        return cls._one

    def knows(self, name: str) -> bool:
        return bool(self.lib.amd_knows(name.encode()))


@dataclass(frozen=True)
class LoadedCode:
    rank: int
    base: int
    index: int
    object: code_object.CodeObject
    text: bytes


class Buffer:
    """Memory of the machine that looks like one array."""

    def __init__(self, machine: "Machine", address: int, shape, dtype) -> None:
        self.machine, self.address = machine, address
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        self.machine.read(self.address, out)
        return out

    def write(self, values: np.ndarray) -> None:
        self.machine.write(
            self.address, np.ascontiguousarray(values, self.dtype).reshape(self.shape)
        )


def undecodable(code: code_object.CodeObject) -> list[str]:
    """Instructions of the whole text that the engine does not know, each once, with a place."""
    engine, seen = Engine.get(), {}
    for inst in decode.text(text_bytes(code)):
        if not engine.knows(inst.name):
            seen.setdefault(inst.name, f"{inst.name} at {inst.offset:#x}: {inst.text}")
    return list(seen.values())


def text_bytes(code: code_object.CodeObject) -> bytes:
    return code_object.bytes_at(code.segments, *code.text)


class Machine:
    """`approximate`: a seed by which v_rcp, v_exp, their like and matrix products' sums err in the
    last place; 0: they are rounded to the nearest. `ns_per_instruction`: how far the clocks move
    with each instruction of any wave."""

    def __init__(
        self,
        isa: str,
        ranks: int = 1,
        seed: int = 0,
        approximate: int = 0,
        ns_per_instruction: float = 1.0,
        lds_races: bool = True,
    ) -> None:
        if isa not in code_object.PARTS.values():
            raise ValueError(f"isa {isa!r}; known: {', '.join(code_object.PARTS.values())}")
        self.isa, self.ranks = isa, ranks
        self.engine = Engine.get()
        self.lib = self.engine.lib
        self.handle = self.lib.amd_create(int(isa == "gfx950"), ranks, seed)
        self.lib.amd_set(self.handle, approximate, ns_per_instruction, int(lds_races))
        self.codes: list[LoadedCode] = []
        self.decoder = DECODER(self.add_instruction)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.lib.amd_destroy(self.handle)
            self.handle = None

    def checked(self, status: int) -> None:
        if status != 0:
            raise MachineError(self.lib.amd_last_error().decode())

    # Memory. All ranks reach all of it.

    def allocate(self, nbytes: int, name: str, read_only: bool = False, owner: int = 0) -> int:
        """Poisoned bytes of a rank, or with owner -1 of the host."""
        address = self.lib.amd_allocate(self.handle, nbytes, name.encode(), int(read_only), owner)
        self.checked(int(address == 0))
        return address

    def array(self, values: np.ndarray, name: str, read_only: bool = False) -> Buffer:
        """A copy of an array. A kernel that stores to a read-only one is stopped."""
        values = np.ascontiguousarray(values)
        address = self.allocate(max(values.nbytes, 1), name, read_only)
        buffer = Buffer(self, address, values.shape, values.dtype)
        if values.nbytes:
            self.write(address, values)
        return buffer

    def poisoned(self, shape, dtype, name: str) -> Buffer:
        """An array that no one has written: every byte is 0xa5."""
        buffer = Buffer(self, 0, shape, dtype)
        buffer.address = self.allocate(max(buffer.nbytes, 1), name)
        return buffer

    def write(self, address: int, values: np.ndarray) -> None:
        self.checked(self.lib.amd_write(self.handle, address, values.ctypes.data, values.nbytes))

    def read(self, address: int, out: np.ndarray) -> None:
        self.checked(self.lib.amd_read(self.handle, address, out.ctypes.data, out.nbytes))

    # Code.

    def load(self, code: code_object.CodeObject, rank: int = 0) -> LoadedCode:
        if code.isa != self.isa:
            raise ValueError(f"{code.path} is for {code.isa}, the machine is {self.isa}")
        base = self.allocate(code.span, f"code of {Path(code.path).name}")
        image = bytearray(code.span)
        for one in code.segments:
            image[one.address : one.address + len(one.data)] = one.data
        for where, target in code.relocations:
            struct.pack_into("<Q", image, where, base + target)
        self.write(base, np.frombuffer(image, np.uint8))
        address, size = code.text
        index = self.lib.amd_add_code(self.handle, base + address, size, self.decoder)
        loaded = LoadedCode(rank, base, index, code, text_bytes(code))
        self.codes.append(loaded)
        return loaded

    def add_instruction(self, index: int, offset: int) -> None:
        try:
            inst = decode.at(self.codes[index].text, offset)
        except decode.DecodeError:
            return  # the engine says where
        fields = (ctypes.c_int32 * len(self.engine.field_at))(*[-1] * len(self.engine.field_at))
        for name, value in inst.fields.items():
            if (at := self.engine.field_at.get(name)) is not None:
                fields[at] = value if value < 1 << 31 else value - (1 << 32)
        name = inst.name.encode()
        numbers = (index, name, offset, inst.size, inst.encoding)
        self.lib.amd_add_instruction(self.handle, *numbers, fields)

    # Launches. Those of a rank run one after another, those of several ranks together.

    def launch(
        self,
        code: LoadedCode,
        kernel: str,
        grid,
        block,
        arguments,
        dynamic_lds: int = 0,
        resident: int = RESIDENT_BLOCKS,
    ) -> None:
        """`grid`: workgroups, `block`: threads; a number or three. Arguments are buffers, numbers
        or bytes in the kernel's order; or all of them as they lie in memory."""
        described = code.object.kernels.get(kernel)
        if described is None:
            known = ", ".join(sorted(code.object.kernels))
            raise ValueError(f"{code.object.path} has no kernel {kernel!r}; it has {known}")
        grid, block = three(grid), three(block)
        threads = block[0] * block[1] * block[2]
        most = described.metadata.get(".max_flat_workgroup_size", 1024)
        if threads > most:
            raise ValueError(f"{kernel}: {threads} threads a workgroup, built for at most {most}")
        if isinstance(arguments, bytes):
            packed = fill(described, grid, block, arguments, dynamic_lds)
        else:
            packed = pack(described, grid, block, arguments, dynamic_lds)
        kernarg = self.allocate(max(len(packed), 8), f"arguments of {kernel}", read_only=True)
        if packed:
            self.write(kernarg, np.frombuffer(packed, np.uint8))
        # The packet of a launch, as far as kernels read it: sizes of workgroups and of the grid.
        packet = struct.pack(
            "<HHHHHHIIIIIQQQQ", 0, 3, *block, 0, *map(int.__mul__, grid, block), *[0] * 6
        )
        dispatch = self.allocate(len(packet), f"launch packet of {kernel}", read_only=True)
        self.write(dispatch, np.frombuffer(packet, np.uint8))
        text = LaunchText(
            kernel=kernel.encode(),
            rank=code.rank,
            code=code.index,
            entry=code.base + described.entry,
            kernarg=kernarg,
            dispatch=dispatch,
            lds_bytes=described.lds_bytes,
            scratch_bytes=described.scratch_bytes,
            rsrc1=described.rsrc1,
            rsrc2=described.rsrc2,
            rsrc3=described.rsrc3,
            properties=described.properties,
            dynamic_lds=dynamic_lds,
            resident=resident,
            grid=(ctypes.c_uint32 * 3)(*grid),
            block=(ctypes.c_uint32 * 3)(*block),
        )
        self.checked(self.lib.amd_launch(self.handle, ctypes.byref(text)))

    def run(self, limit: int = INSTRUCTION_LIMIT, patience: int = PATIENCE) -> int:
        """Runs all launches. Gives the instructions that it took; raises MachineError, and then
        all launches are forgotten."""
        before = self.instructions
        place = FaultPlace()
        status = self.lib.amd_run(self.handle, limit, patience, ctypes.byref(place))
        if status != 0:
            raise self.error(place)
        return self.instructions - before

    def run_some(self, rank: int, limit: int, patience: int = PATIENCE) -> None:
        """Runs until a rank's launches are done, and at most `limit` instructions."""
        place = FaultPlace()
        if self.lib.amd_run_some(self.handle, rank, limit, patience, ctypes.byref(place)) != 0:
            raise self.error(place)

    @property
    def instructions(self) -> int:
        return self.lib.amd_instructions(self.handle)

    def error(self, place: FaultPlace) -> MachineError:
        what = self.lib.amd_last_error().decode()
        if place.code < 0:
            return MachineError(what)
        try:
            line = decode.at(self.codes[place.code].text, place.offset).text
        except decode.DecodeError:
            line = "(no instruction)"
        return MachineError(
            what,
            f"\n  rank {place.rank} kernel {place.kernel.decode()} workgroup "
            f"{tuple(place.workgroup)} wave {place.wave} exec {place.exec:#x} at "
            f"{place.offset:#x}: {line}",
        )


def three(value) -> tuple[int, int, int]:
    if isinstance(value, int):
        return (value, 1, 1)
    return tuple([*value, 1, 1][:3])


def pack(kernel: code_object.Kernel, grid, block, arguments, dynamic_lds: int) -> bytes:
    """The kernarg segment of arguments one by one."""
    out = bytearray()
    plain = [one for one in kernel.arguments if not one.kind.startswith("hidden_")]
    if len(plain) != len(arguments):
        raise ValueError(f"{kernel.name}: {len(arguments)} arguments, it takes {len(plain)}")
    for described, value in zip(plain, arguments, strict=True):
        if isinstance(value, Buffer):
            data = struct.pack("<Q", value.address)
        elif isinstance(value, bytes):
            data = value
        elif isinstance(value, np.generic):
            data = value.tobytes()
        elif isinstance(value, float):
            data = struct.pack("<f" if described.size == 4 else "<d", value)
        else:
            data = int(value).to_bytes(described.size, "little", signed=value < 0)
        if len(data) != described.size:
            raise ValueError(
                f"{kernel.name}: an argument of {len(data)} bytes at offset {described.offset}, "
                f"it takes {described.size}"
            )
        out[len(out) :] = bytes(described.offset - len(out)) + data
    return fill(kernel, grid, block, bytes(out), dynamic_lds)


def fill(kernel: code_object.Kernel, grid, block, given: bytes, dynamic_lds: int) -> bytes:
    """The kernarg segment: what the caller gives, and the hidden arguments that we can say."""
    # Whole lines: a compiler loads several arguments at once, and may load past the last.
    size = max(kernel.kernarg_bytes, len(given))
    out = bytearray((size + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES)
    out[: len(given)] = given
    hidden = {
        "hidden_grid_dims": 1 + (grid[1] > 1 or grid[2] > 1) + (grid[2] > 1),
        "hidden_dynamic_lds_size": dynamic_lds,
    }
    for axis, letter in enumerate("xyz"):
        hidden[f"hidden_block_count_{letter}"] = grid[axis]
        hidden[f"hidden_group_size_{letter}"] = block[axis]
        hidden[f"hidden_remainder_{letter}"] = 0
        hidden[f"hidden_global_offset_{letter}"] = 0
    for one in kernel.arguments:
        if one.kind in hidden:
            data = hidden[one.kind].to_bytes(one.size, "little")
            out[one.offset : one.offset + one.size] = data
    return bytes(out)
