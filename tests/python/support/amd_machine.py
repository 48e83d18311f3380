"""The machine of tests/tools/amd, and code objects for it: of HIP sources and of assembly."""

import importlib.util
import os
import sys
from pathlib import Path

from support import amd_tools
from support.amd_tools import NoToolsError

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/tools"))

from amd import code_object, hip, machine  # noqa: E402 - its folder is named above

ISAS = amd_tools.ARCHITECTURES
ASSEMBLE_BUDGET_S = 300
# More shapes and schedules: make test-deep.
DEEP = bool(os.environ.get("LOWLAT_AMD_DEEP"))


def compiler() -> "amd_tools.amd_compile.Compiler":
    """Raises NoToolsError, also where the decoder is missing."""
    if importlib.util.find_spec("tinygrad") is None:
        raise NoToolsError(
            "no tinygrad, which decodes: pip install -r tests/tools/requirements.txt with Python"
            " 3.11 or newer"
        )
    return amd_tools.compiler()


def compiled(source: Path, isa: str, folder: Path) -> code_object.CodeObject:
    """The code object of a HIP file. Raises NoToolsError."""
    compiler()
    return code_object.read(amd_tools.compiled(source, isa, folder))


def code(name: str, isa: str) -> code_object.CodeObject:
    """Of host/amd/NAME.hip. Raises NoToolsError."""
    compiler()
    return code_object.read(amd_tools.code_object(name, isa))


def stages(isa: str) -> code_object.CodeObject:
    """Every stage as a kernel. Raises NoToolsError."""
    return code("stages", isa)


def assembled(text: str, isa: str, folder: Path, name: str = "kernels") -> code_object.CodeObject:
    """The code object of assembly. Raises NoToolsError; RuntimeError says what is wrong in it."""
    clang, run = compiler(), amd_tools.amd_compile.run
    source, thing = folder / f"{name}.{isa}.s", folder / f"{name}.{isa}.o"
    source.write_text(text)
    made = thing.with_suffix(".hsaco")
    target = ["--target=amdgcn-amd-amdhsa", f"-mcpu={isa}"]
    run([*clang.clang, *target, "-c", str(source), "-o", str(thing)], ASSEMBLE_BUDGET_S)
    run([*clang.lld, "-shared", str(thing), "-o", str(made)], ASSEMBLE_BUDGET_S)
    return code_object.read(made)


def kernel_text(name: str, body: str, lds_bytes: int = 0, private_bytes: int = 0) -> str:
    """Assembly of a kernel: s[0:1] points at its arguments, s2 is the workgroup, v0 the thread."""
    return f"""
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{body}
  s_endpgm
.size {name}, .-{name}
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_group_segment_fixed_size {lds_bytes}
  .amdhsa_private_segment_fixed_size {private_bytes}
  .amdhsa_enable_private_segment {int(private_bytes > 0)}
  .amdhsa_kernarg_size 32
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_next_free_vgpr 512
  .amdhsa_next_free_sgpr 96
  .amdhsa_accum_offset 256
  .amdhsa_float_denorm_mode_32 3
.end_amdhsa_kernel
"""


__all__ = [
    "DEEP",
    "ISAS",
    "NoToolsError",
    "assembled",
    "code",
    "code_object",
    "compiled",
    "compiler",
    "hip",
    "kernel_text",
    "machine",
    "stages",
]
