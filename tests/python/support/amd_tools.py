"""A clang for AMD code objects, and what it made of the kernels, for tests without a GPU.

The compiler is looked for as the build does it (cpp_kernels/cmake/amd_compile.py); where there is
none, pip fetches one below LOWLAT_CACHE or ~/.cache/lowlat, once (100 MB). What was compiled stays
there too, in a folder named after everything that went into it.
"""

import functools
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_SPEC = importlib.util.spec_from_file_location(
    "amd_compile", ROOT / "cpp_kernels/cmake/amd_compile.py"
)
assert _SPEC is not None and _SPEC.loader is not None
amd_compile = importlib.util.module_from_spec(_SPEC)
sys.modules["amd_compile"] = amd_compile  # dataclasses look their module up
_SPEC.loader.exec_module(amd_compile)

ARCHITECTURES = amd_compile.ARCHITECTURES
NoToolsError = amd_compile.NoCompilerError
ARGUMENT = re.compile(r"- (?:\.address_space:.*\n\s+)?\.offset:[\s\S]*?value_kind:.*")


def cache() -> Path:
    return Path(os.environ.get("LOWLAT_CACHE") or "~/.cache/lowlat").expanduser()


def compiler() -> "amd_compile.Compiler":
    """Raises NoToolsError."""
    found = _compiler_or_why()
    if isinstance(found, str):
        raise NoToolsError(found)
    return found


@functools.cache
def _compiler_or_why() -> "amd_compile.Compiler | str":
    """Looked for once: a fetch that fails takes its time, and every test asks."""
    folder = cache() / amd_compile.PACKAGE.replace("==", "-")
    try:
        try:
            return amd_compile.find(folder)
        except NoToolsError:
            amd_compile.fetch(folder)
            return amd_compile.find(folder)
    except NoToolsError as error:
        return str(error)


def _digest() -> str:
    """Of the compiler and of everything that a kernel may include."""
    digest = hashlib.sha256(compiler().version().encode())
    kernels = ROOT / "cpp_kernels"
    rooms = ("platform", "stages", "persistent", "shape", "include", "host/amd", "cmake")
    names = sorted(path for room in rooms for path in (kernels / room).rglob("*.*"))
    for path in names:
        if path.suffix in (".hpp", ".h", ".hip") or path.name == "amd_compile.py":
            digest.update(str(path.relative_to(kernels)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _folder() -> Path:
    folder = cache() / f"amd-code-{_digest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="lowlat-amd-code-"))
    return folder


@functools.cache
def code_object(name: str, arch: str) -> Path:
    """The code object of cpp_kernels/host/amd/NAME.hip, with its assembly beside it (.s)."""
    return compiled(ROOT / f"cpp_kernels/host/amd/{name}.hip", arch, _folder())


def compiled(source: Path, arch: str, folder: Path) -> Path:
    done = folder / f"{source.stem}.{arch}.hsaco"
    if not done.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as part:
            amd_compile.compile_one(compiler(), source, arch, Path(part))
            for made in sorted(Path(part).iterdir(), key=lambda path: path.suffix == ".hsaco"):
                made.rename(folder / made.name)
    return done


@dataclass
class Kernel:
    """What the assembly says of one kernel."""

    name: str
    facts: dict[str, int] = field(default_factory=dict)  # of its metadata: vgpr_count ...
    arguments: list[tuple[int, int]] = field(default_factory=list)  # offset and bytes, no hidden
    code: list[str] = field(default_factory=list)  # lines, with labels and comments


def kernels_of(assembly: str) -> dict[str, Kernel]:
    """The kernels of a file that the compiler wrote with -S."""
    found = {}
    metadata = assembly[assembly.index("amdhsa.kernels:") :]
    for text in re.split(r"^  - (?=\.)", metadata, flags=re.MULTILINE)[1:]:
        if not (name := re.search(r"^    \.name:\s+(\w+)", text, re.MULTILINE)):
            continue
        kernel = found[name[1]] = Kernel(name[1])
        for key, value in re.findall(r"^\s{0,4}\.(\w+):\s+(\d+)$", text, re.MULTILINE):
            kernel.facts[key] = int(value)
        for one in ARGUMENT.findall(text):
            if "hidden_" not in one:
                offset = re.search(r"\.offset:\s+(\d+)", one)
                size = re.search(r"\.size:\s+(\d+)", one)
                kernel.arguments.append((int(offset[1]), int(size[1])))
    for name, kernel in found.items():
        body = re.search(rf"^{name}:.*?^\.Lfunc_end\d+:", assembly, re.MULTILINE | re.DOTALL)
        kernel.code = body[0].splitlines()
    return found


@dataclass
class Part:
    """One basic block: its label, the innermost loop that it is in, its instructions."""

    label: str
    loop: str | None
    code: list[str]


def parts_of(kernel: Kernel) -> list[Part]:
    """The basic blocks, each with the label of its loop's header, by the compiler's comments."""
    parts: list[Part] = []
    for line in kernel.code:
        if start := re.match(r"^(?:\.L|; %)(\w+[.\w]*):(.*)", line):
            parts.append(Part(start[1].replace("bb.", ""), None, []))
            line = start[2]
        if not parts:
            parts.append(Part("entry", None, []))
        if inside := re.search(r"; +in Loop: Header=(\w+)", line):
            parts[-1].loop = inside[1]
        elif re.search(r"; =>.*Loop Header", line):
            parts[-1].loop = parts[-1].label
        if instruction := re.match(r"^\t([a-z]\w+.*)", line):
            parts[-1].code.append(instruction[1])
    return parts
