"""Instructions of a code object, decoded by tinygrad: names and fields for the engine."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

PADDING = 0xBF800000  # s_nop 0, which fills up to the end of the text


@dataclass(frozen=True)
class Decoded:
    offset: int
    size: int
    name: str
    encoding: int  # of the engine: sdwa 1, dpp 2, vop3 4, vop3p 8, scalar 16
    fields: dict[str, int]
    text: str


class DecodeError(ValueError):
    """Bytes that are no instruction of the part."""


@functools.cache
def decoder():
    from tinygrad.renderer.amd import decode_inst, dsl

    return decode_inst, dsl


def plain_name(name: str) -> str:
    return re.sub(r"_(e32|e64)$", "", name.lower())


def encoding_of(kind: str) -> int:
    return (
        (1 if "SDWA" in kind else 0)
        | (2 if "DPP" in kind else 0)
        | (4 if kind.startswith("VOP3") else 0)
        | (8 if kind.startswith("VOP3P") else 0)
        | (16 if kind.startswith("S") and kind != "SCRATCH" else 0)
    )


def fields_of(inst) -> dict[str, int]:
    """Each field's number; registers in the one space of sources, 0 .. 511."""
    _, dsl = decoder()
    out = {}
    for name, field in inst._fields:
        if isinstance(field, dsl.FixedBitField) or name == "op":
            continue
        value = (inst._raw >> field.lo) & field.mask
        if isinstance(field, dsl.AlignedSGPRField):
            value *= field._align
        elif isinstance(field, dsl.SrcField):
            value += field._valid_range[0]
        out[name] = value
    return out


@functools.lru_cache(maxsize=65536)
def one(data: bytes) -> tuple[int, str, int, dict[str, int], str]:
    decode_inst, _ = decoder()
    inst = decode_inst(data, "cdna")
    kind = type(inst).__name__
    fields = fields_of(inst)
    name = plain_name(inst.op.name)
    # A comparison's destination is a scalar pair, wherever its encoding keeps the number.
    if kind.startswith(("VOP3_SDST", "VOP3SD")) or (kind == "VOP3" and name.startswith("v_cmp")):
        fields.setdefault("sdst", fields.get("vdst", 0) & 0xFF)
    return inst.size(), name, encoding_of(kind), fields, f"{inst!r}"


def at(data: bytes, offset: int) -> Decoded:
    """The instruction at an offset of a text."""
    try:
        return Decoded(offset, *one(data[offset : offset + 16]))
    except ValueError as error:
        raise DecodeError(f"at {offset:#x}: {error}") from error


def text(data: bytes) -> Iterator[Decoded]:
    """Every instruction of a text, without the padding that follows the last."""
    end = len(data)
    while end >= 4 and int.from_bytes(data[end - 4 : end], "little") == PADDING:
        end -= 4
    offset = 0
    while offset < end:
        inst = at(data, offset)
        yield inst
        offset += inst.size
