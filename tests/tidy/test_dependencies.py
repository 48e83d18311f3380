"""Dependencies point one way: who may know whom, by language."""

import ast
import re
from pathlib import PurePosixPath

import tree

# Room of cpp_kernels: the rooms that its files may include. `include` is the C ABI.
CPP_ROOMS = {
    "include": set(),
    "platform": {"platform"},
    "shape": {"shape"},
    "stages": {"platform", "shape", "stages"},
    "fused": {"fused", "stages", "platform", "shape", "include"},
    "persistent": {"persistent", "stages", "platform", "shape", "include"},
    "reference": {"reference", "shape"},
    "host": {"host", "fused", "persistent", "stages", "platform", "shape", "reference", "include"},
    "py": {"include", "py"},
    "bench": {
        *("bench", "host", "persistent", "fused", "stages", "platform", "shape", "reference"),
        "include",
    },
}
CPP = (".h", ".hpp", ".cpp", ".cuh", ".cu", ".hip")
VENDOR_MACROS = r"\b(__CUDACC__|__CUDA_ARCH__|__NVCC__|__HIPCC__|__HIP__|__HIP_PLATFORM|__gfx\w+__)"
# What core may not reach: other languages, the machine, and time outside its one door.
CORE_FORBIDDEN = r"\b(pyo3|libloading|std::(env|fs|net|process|os)\b|extern \"C\")"
CORE_SYNC_ONLY = r"\bstd::(time|thread|sync|cell)\b|\bcore::(sync|cell)\b"
# The part of numpy that moves arrays and computes nothing.
NUMPY_HANDS_OVER = {"lib", "savez", "ndarray"}


def room_of(include: str, includer: str) -> str | None:
    """The room that holds an included file; None when there is no such file."""
    here = PurePosixPath(includer).parent
    for base in (PurePosixPath("cpp_kernels"), PurePosixPath("cpp_kernels/include"), here):
        name = (base / include).as_posix()
        if name in tree.files():
            return PurePosixPath(name).parts[1]
    return None


def test_cpp_rooms_include_only_what_they_may() -> None:
    complaints = []
    for name in tree.under("cpp_kernels", suffixes=CPP):
        room = PurePosixPath(name).parts[1]
        if room not in CPP_ROOMS:
            complaints.append(f"{name}: no rule for the room {room}; add it to CPP_ROOMS")
            continue
        code = tree.c_without_comments(name)
        for include in re.findall(r'^\s*#\s*include\s+"([^"]+)"', code, re.MULTILINE):
            seen = room_of(include, name)
            if seen is None:
                complaints.append(f'{name}: includes "{include}", which is no file of ours')
            elif seen not in CPP_ROOMS[room]:
                complaints.append(f'{name}: {room} may not include {seen} ("{include}")')
    tree.none(complaints)


def test_vendor_macros_stay_in_platform() -> None:
    complaints = []
    for name in tree.under("cpp_kernels", suffixes=CPP):
        if name.startswith("cpp_kernels/platform/"):
            continue
        complaints += tree.matches(
            name, tree.c_without_comments(name), VENDOR_MACROS, "a vendor belongs in platform/"
        )
    tree.none(complaints)


def test_kernels_read_no_environment_and_know_no_framework() -> None:
    complaints = []
    for name in tree.under("cpp_kernels", suffixes=CPP):
        code = tree.c_without_comments(name)
        complaints += tree.matches(
            name, code, r"\b(secure_)?getenv\b", "kernels read no environment"
        )
        complaints += tree.matches(
            name, code, r'#\s*include\s*[<"](torch|ATen|c10)/', "no framework header"
        )
        if not name.startswith("cpp_kernels/py/"):
            complaints += tree.matches(
                name, code, r'#\s*include\s*[<"](pybind11/|Python\.h)', "Python stays in py/"
            )
    tree.none(complaints)


def test_core_knows_no_machine_and_no_clock() -> None:
    complaints = []
    for name in tree.under("rust_dispatch/core/src", suffixes=(".rs",)):
        code = tree.rust_without_tests(name)
        complaints += tree.matches(name, code, CORE_FORBIDDEN, "core may not know this")
        if PurePosixPath(name).name != "sync.rs" and "/sync/" not in name:
            complaints += tree.matches(name, code, CORE_SYNC_ONLY, "comes through crate::sync only")
    tree.none(complaints)


def test_crates_depend_one_way() -> None:
    may = {
        "core": set(),
        "host": {"lowlat-core"},
        "capi": {"lowlat-core", "lowlat-host"},
        "py": {"lowlat-core", "lowlat-host"},
        "engine": {"lowlat-core", "lowlat-host"},
    }
    complaints = []
    for crate, allowed in may.items():
        manifest = tree.read(f"rust_dispatch/{crate}/Cargo.toml")
        seen = set(re.findall(r"^(lowlat-\w+)(?:\.workspace)?\s*=", manifest, re.MULTILINE))
        if seen - allowed:
            complaints.append(f"{crate} depends on {sorted(seen - allowed)}; it may not")
    tree.none(complaints)


def test_core_manifest_names_no_other_language() -> None:
    manifest = tree.read("rust_dispatch/core/Cargo.toml")
    tree.none(
        tree.matches(
            "rust_dispatch/core/Cargo.toml", manifest, r"^(pyo3|libloading|libc|rustix)\b", "no"
        )
    )


def test_python_hands_over_and_does_not_compute() -> None:
    complaints = []
    for name in tree.under("python/lowlat", suffixes=(".py",)):
        for node in ast.walk(ast.parse(tree.read(name))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("np", "numpy")
                and node.attr not in NUMPY_HANDS_OVER
            ):
                complaints.append(f"{name}:{node.lineno}: numpy.{node.attr} computes")
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "numpy":
                complaints.append(f"{name}:{node.lineno}: import numpy as np, so that a test sees")
    tree.none(complaints)


def test_python_reads_the_environment_in_env_only() -> None:
    complaints = []
    for name in tree.under("python/lowlat", suffixes=(".py",)):
        if name != "python/lowlat/env.py":
            complaints += tree.matches(
                name, tree.read(name), r"\bos\.(environ|getenv)\b", "only env.py reads it"
            )
    tree.none(complaints)


def test_the_package_imports_nothing_heavy_at_the_top() -> None:
    """numpy and the native modules are imported where they are used, by command."""
    light = {"python/lowlat/__init__.py", "python/lowlat/cli/main.py", "python/lowlat/cli/op.py"}
    complaints = []
    for name in sorted(light):
        for node in ast.parse(tree.read(name)).body:
            words = []
            if isinstance(node, ast.Import):
                words = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                words = [node.module or ""]
            for word in words:
                if word.split(".")[0] in ("numpy", "torch", "sglang") or word.startswith(
                    ("lowlat._", "lowlat.cli.npz")
                ):
                    complaints.append(f"{name}:{node.lineno}: imports {word} at the top")
    tree.none(complaints)
