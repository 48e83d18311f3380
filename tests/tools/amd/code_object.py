"""Reads an AMD GPU code object: an ELF file with kernel descriptors and metadata."""

import struct
from dataclasses import dataclass
from pathlib import Path

ELF_MAGIC = b"\x7fELF"
MACHINE_AMDGPU = 224
PARTS = {0x4C: "gfx942", 0x4F: "gfx950"}
PT_LOAD, SHT_DYNSYM, SHT_RELA, SHT_NOTE, SHF_EXECINSTR = 1, 11, 4, 7, 4
NOTE_METADATA = 32
R_RELATIVE64, R_ABS64 = 13, 3


@dataclass(frozen=True)
class Argument:
    """One kernel argument. `kind` is the metadata's value_kind; hidden ones begin "hidden_"."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Kernel:
    name: str
    entry: int  # virtual address
    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    arguments: tuple[Argument, ...]
    metadata: dict


@dataclass(frozen=True)
class Segment:
    address: int
    data: bytes  # as long as in memory
    executable: bool


@dataclass(frozen=True)
class CodeObject:
    path: str
    isa: str
    segments: tuple[Segment, ...]
    relocations: tuple[tuple[int, int], ...]  # where, and the address that it holds
    text: tuple[int, int]  # virtual address and bytes
    kernels: dict[str, Kernel]
    symbols: dict[str, tuple[int, int]]

    @property
    def span(self) -> int:
        return max(one.address + len(one.data) for one in self.segments)


class CodeObjectError(ValueError):
    """The file is no code object that we can run; the words say why."""


def read(path: str | Path) -> CodeObject:
    return parse(Path(path).read_bytes(), str(path))


def parse(data: bytes, path: str = "code object") -> CodeObject:
    if data[:4] != ELF_MAGIC or len(data) < 64:
        raise CodeObjectError(f"{path}: no ELF file")
    machine, flags = struct.unpack_from("<H", data, 18)[0], struct.unpack_from("<I", data, 48)[0]
    if machine != MACHINE_AMDGPU:
        raise CodeObjectError(f"{path}: ELF machine {machine}, needed {MACHINE_AMDGPU} (AMD GPU)")
    if (isa := PARTS.get(flags & 0xFF)) is None:
        raise CodeObjectError(
            f"{path}: part {flags & 0xFF:#x}; {' and '.join(PARTS.values())} are known"
        )
    sections = section_headers(data)
    segments = tuple(load_segments(data))
    symbols = read_symbols(data, sections)
    metadata = read_metadata(data, sections)
    text = next(((s.address, s.size) for s in sections if s.flags & SHF_EXECINSTR), None)
    if text is None:
        raise CodeObjectError(f"{path}: holds no instructions")
    by_symbol = {one[".symbol"]: one for one in metadata.get("amdhsa.kernels", [])}
    kernels = {}
    for symbol, (address, size) in symbols.items():
        if symbol.endswith(".kd") and size == 64:
            name = symbol.removesuffix(".kd")
            described = by_symbol.get(symbol, {})
            kernels[name] = descriptor(name, address, bytes_at(segments, address, 64), described)
    if not kernels:
        raise CodeObjectError(f"{path}: holds no kernel")
    relocations = tuple(read_relocations(data, sections, list(symbols.values())))
    return CodeObject(path, isa, segments, relocations, text, kernels, symbols)


@dataclass(frozen=True)
class Section:
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int


def section_headers(data: bytes) -> list[Section]:
    at, count = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<H", data, 60)[0]
    out = []
    for i in range(count):
        _, kind, flags, address, offset, size, link, *_ = struct.unpack_from(
            "<IIQQQQIIQQ", data, at + 64 * i
        )
        out.append(Section(kind, flags, address, offset, size, link))
    return out


def load_segments(data: bytes):
    at, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
    for i in range(count):
        kind, flags, offset, address, _, in_file, in_memory, _ = struct.unpack_from(
            "<IIQQQQQQ", data, at + 56 * i
        )
        if kind == PT_LOAD:
            body = data[offset : offset + in_file].ljust(in_memory, b"\0")
            yield Segment(address, body, bool(flags & 1))


def text_at(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def read_symbols(data: bytes, sections: list[Section]) -> dict[str, tuple[int, int]]:
    out = {}
    for section in sections:
        if section.kind != SHT_DYNSYM:
            continue
        names = sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, 24):
            name, _, _, _, value, size = struct.unpack_from("<IBBHQQ", data, at)
            out[text_at(data, names + name)] = (value, size)
    return out


def read_relocations(data: bytes, sections: list[Section], symbols: list[tuple[int, int]]):
    for section in sections:
        if section.kind != SHT_RELA:
            continue
        for at in range(section.offset, section.offset + section.size, 24):
            where, info, addend = struct.unpack_from("<QQq", data, at)
            if info & 0xFFFFFFFF == R_RELATIVE64:
                yield where, addend
            elif info & 0xFFFFFFFF == R_ABS64:
                yield where, symbols[info >> 32][0] + addend
            else:
                raise CodeObjectError(f"relocation of type {info & 0xFFFFFFFF} is not known")


def read_metadata(data: bytes, sections: list[Section]) -> dict:
    for section in sections:
        if section.kind != SHT_NOTE:
            continue
        at, end = section.offset, section.offset + section.size
        while at < end:
            name_bytes, body_bytes, kind = struct.unpack_from("<III", data, at)
            body = at + 12 + (name_bytes + 3) // 4 * 4
            if kind == NOTE_METADATA:
                return unpack(data[body : body + body_bytes], 0)[0]
            at = body + (body_bytes + 3) // 4 * 4
    return {}


def bytes_at(segments: tuple[Segment, ...], address: int, size: int) -> bytes:
    for one in segments:
        if one.address <= address and address + size <= one.address + len(one.data):
            return one.data[address - one.address :][:size]
    raise CodeObjectError(f"address {address:#x} lies in no segment")


def descriptor(name: str, address: int, data: bytes, described: dict) -> Kernel:
    lds, scratch, kernarg, _, entry = struct.unpack_from("<IIIIq", data, 0)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", data, 44)
    properties = struct.unpack_from("<H", data, 56)[0]
    arguments = tuple(
        Argument(one[".offset"], one[".size"], one[".value_kind"])
        for one in described.get(".args", [])
    )
    return Kernel(
        name=name,
        entry=address + entry,
        lds_bytes=lds,
        scratch_bytes=scratch,
        kernarg_bytes=max(kernarg, described.get(".kernarg_segment_size", 0)),
        rsrc1=rsrc1,
        rsrc2=rsrc2,
        rsrc3=rsrc3,
        properties=properties & 0x7F,
        arguments=arguments,
        metadata=described,
    )


def unpack(data: bytes, at: int):
    """MessagePack, as far as metadata uses it: maps, arrays, strings, integers, booleans."""
    first = data[at]
    if first < 0x80:
        return first, at + 1
    if first >= 0xE0:
        return first - 256, at + 1
    if first >> 4 == 8:
        return unpack_map(data, at + 1, first & 15)
    if first >> 4 == 9:
        return unpack_array(data, at + 1, first & 15)
    if first >> 5 == 5:
        return unpack_text(data, at + 1, first & 31)
    sized = {0xD9: ("B", 1), 0xDA: (">H", 2), 0xDB: (">I", 4), 0xDC: (">H", 2), 0xDD: (">I", 4)}
    sized |= {0xDE: (">H", 2), 0xDF: (">I", 4)}
    if first in sized:
        form, width = sized[first]
        count = struct.unpack_from(form, data, at + 1)[0]
        kind = unpack_text if first < 0xDC else unpack_array if first < 0xDE else unpack_map
        return kind(data, at + 1 + width, count)
    if first in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[first], at + 1
    numbers = {0xCC: "B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
    numbers |= {0xD0: "b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
    if first in numbers:
        form = numbers[first]
        return struct.unpack_from(form, data, at + 1)[0], at + 1 + struct.calcsize(form)
    raise CodeObjectError(f"metadata: unknown MessagePack byte {first:#x}")


def unpack_map(data: bytes, at: int, count: int):
    out = {}
    for _ in range(count):
        key, at = unpack(data, at)
        out[key], at = unpack(data, at)
    return out, at


def unpack_array(data: bytes, at: int, count: int):
    out = []
    for _ in range(count):
        one, at = unpack(data, at)
        out.append(one)
    return out, at


def unpack_text(data: bytes, at: int, count: int):
    return data[at : at + count].decode(), at + count
