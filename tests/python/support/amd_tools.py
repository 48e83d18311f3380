"""Code objects of the platform amd for tests, compiled once for these sources, and the machine.

The compiler is cpp_kernels/cmake/amd_compile.py's; where LOWLAT_CACHE names a folder, one is fetched
into it. tests/tools/amd runs what it makes.
"""

import functools
import hashlib
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMPILE = ROOT / "cpp_kernels/cmake/amd_compile.py"
OUT = ROOT / "build/amd-test"
sys.path.insert(0, str(ROOT / "tests/tools"))

from amd import code_object, hip, machine  # noqa: E402 - its folder is named above

ISAS = ("gfx942", "gfx950")
ASSEMBLE_BUDGET_S = 60
HEADERS = ("platform", "stages", "persistent", "shape", "include", "host/amd")


class NoToolsError(Exception):
    """The words say what is missing and what would bring it."""


@functools.cache
def compile_module():
    spec = importlib.util.spec_from_file_location("amd_compile", COMPILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@functools.cache
def compiler():
    """Raises NoToolsError."""
    if importlib.util.find_spec("tinygrad") is None:
        raise NoToolsError(
            "no tinygrad, which decodes: pip install -r tests/tools/requirements.txt"
        )
    made = compile_module()
    cache = os.environ.get("LOWLAT_CACHE")
    fetched = Path(cache) / made.PACKAGE.replace("==", "-") if cache else None
    try:
        try:
            return made.find(fetched)
        except made.NoCompilerError:
            if fetched is None:
                raise
            made.fetch(fetched)
            return made.find(fetched)
    except made.NoCompilerError as error:
        raise NoToolsError(str(error)) from error


@functools.cache
def sources_mark() -> str:
    """Changes with everything that a kernel may include."""
    mark = hashlib.sha256(COMPILE.read_bytes())
    for room in HEADERS:
        for path in sorted((ROOT / "cpp_kernels" / room).rglob("*.h*")):
            mark.update(path.read_bytes())
    return mark.hexdigest()


def compiled(source: Path, isa: str, folder: Path | None = None) -> code_object.CodeObject:
    """The code object of a HIP file, kept below build/ until a source changes, or put into
    `folder`. Raises NoToolsError."""
    clang = compiler()
    mark = hashlib.sha256(f"{sources_mark()}{source}".encode() + source.read_bytes())
    out = folder or OUT / mark.hexdigest()[:16]
    made = out / f"{source.stem}.{isa}.hsaco"
    if not made.is_file():
        out.mkdir(parents=True, exist_ok=True)
        part = out / f"{os.getpid()}"
        part.mkdir(exist_ok=True)
        compile_module().compile_one(clang, source, isa, part).replace(made)
        (part / f"{source.stem}.{isa}.s").replace(out / f"{source.stem}.{isa}.s")
        part.rmdir()
    return code_object.read(made)


def assembled(text: str, isa: str, folder: Path, name: str = "kernels") -> code_object.CodeObject:
    """The code object of assembly. Raises NoToolsError, or RuntimeError with the assembler's words."""
    clang, run = compiler(), compile_module().run
    source, thing = folder / f"{name}.{isa}.s", folder / f"{name}.{isa}.o"
    source.write_text(text)
    made = thing.with_suffix(".hsaco")
    target = ["--target=amdgcn-amd-amdhsa", f"-mcpu={isa}"]
    run([*clang.clang, *target, "-c", str(source), "-o", str(thing)], ASSEMBLE_BUDGET_S)
    run([*clang.lld, "-shared", str(thing), "-o", str(made)], ASSEMBLE_BUDGET_S)
    return code_object.read(made)


def kernel_text(name: str, body: str, lds_bytes: int = 0, argument_bytes: int = 32) -> str:
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
  .amdhsa_kernarg_size {argument_bytes}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_next_free_vgpr 512
  .amdhsa_next_free_sgpr 96
  .amdhsa_accum_offset 256
  .amdhsa_float_denorm_mode_32 3
.end_amdhsa_kernel
"""


def stages(isa: str) -> code_object.CodeObject:
    """Every stage as a kernel."""
    return compiled(ROOT / "cpp_kernels/host/amd/stages.hip", isa)


__all__ = [
    "ISAS",
    "NoToolsError",
    "assembled",
    "code_object",
    "compiled",
    "compiler",
    "hip",
    "kernel_text",
    "machine",
    "stages",
]
