"""Compiles HIP files to code objects without ROCm: no vendor's headers, no device library.

    python3 amd_compile.py --find [--fetched DIR] [--fetch]
    python3 amd_compile.py --arch gfx950 --out FOLDER FILE.hip...  [--fetched DIR]

The compiler is LOWLAT_HIP_CLANG (a clang of version 22 or newer with its ld.lld beside it or in
PATH), clang-22 of PATH, the pip package ziglang of this interpreter, or ziglang in DIR; --fetch
puts it there with pip. Each FILE.hip becomes FOLDER/FILE.ARCH.s and FOLDER/FILE.ARCH.hsaco. Exit
status 1 with one line when there is no compiler, 2 when a file does not compile.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = ("gfx942", "gfx950")
PACKAGE = "ziglang==0.17.1"  # its clang is 22.1
OLDEST_CLANG = 22
FETCH_BUDGET_S = 240
COMPILE_BUDGET_S = 600
KERNELS = Path(__file__).resolve().parents[1]
# As for every C++ file of ours, a product and a sum become one rounding only where the source says
# fma; clang contracts HIP otherwise. Version 5 of code objects is what all of ROCm 6 and 7 loads.
FLAGS = (
    *("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"),
    *("-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"),
    "-mcode-object-version=5",
)


class NoCompilerError(Exception):
    """The words say what is missing and what would bring it."""


@dataclass(frozen=True)
class Compiler:
    clang: tuple[str, ...]
    lld: tuple[str, ...]
    # clang's own headers, where it does not know its place: after all others.
    headers: str | None

    def version(self) -> str:
        return run([*self.clang, "--version"], 60).splitlines()[0]


def run(command: list[str], budget_s: int) -> str:
    """Raises RuntimeError with what the program said."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=budget_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from None
    if done.returncode != 0:
        raise RuntimeError(done.stderr or done.stdout)
    return done.stdout


def of_clang(path: str) -> Compiler | None:
    """A clang that is new enough and has its linker."""
    try:
        said = run([path, "--version"], 60)
    except RuntimeError:
        return None
    version = re.search(r"clang version (\d+)", said)
    suffix = re.search(r"-\d+$", path)
    name = "ld.lld" + (suffix[0] if suffix else "")
    beside = Path(path).resolve().with_name("ld.lld")
    lld = str(beside) if beside.is_file() else shutil.which(name)
    if version is None or int(version[1]) < OLDEST_CLANG or lld is None:
        return None
    return Compiler((path,), (lld,), None)


def of_zig(package: Path) -> Compiler | None:
    """The package's clang and lld."""
    zig = package / "zig"
    if not zig.is_file():
        return None
    return Compiler((str(zig), "clang"), (str(zig), "ld.lld"), str(package / "lib" / "include"))


def find(fetched: Path | None) -> Compiler:
    """Raises NoCompilerError."""
    if asked := os.environ.get("LOWLAT_HIP_CLANG"):
        if seen := of_clang(asked):
            return seen
        raise NoCompilerError(
            f"LOWLAT_HIP_CLANG is {asked}; needed clang {OLDEST_CLANG} or newer with its ld.lld"
        )
    for name in ("clang-22", "clang++-22"):
        path = shutil.which(name)
        if path and (seen := of_clang(path)):
            return seen
    spec = importlib.util.find_spec("ziglang")
    for place in spec.submodule_search_locations or [] if spec else []:
        if seen := of_zig(Path(place)):
            return seen
    if fetched and (seen := of_zig(fetched / "ziglang")):
        return seen
    raise NoCompilerError(
        f"no clang {OLDEST_CLANG} for AMD code objects: install clang-22 and lld-22, or"
        f" `pip install {PACKAGE}`, or set LOWLAT_HIP_CLANG"
    )


def fetch(folder: Path) -> None:
    """Puts the package into a folder. Raises NoCompilerError."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        run([*command, "--retries", "2", "--target", str(part), PACKAGE], FETCH_BUDGET_S)
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.rename(folder)
    except (RuntimeError, OSError) as error:
        shutil.rmtree(part, ignore_errors=True)
        if of_zig(folder / "ziglang"):
            return  # another process was faster
        words = (str(error).strip().splitlines() or ["no word"])[-1][:300]
        raise NoCompilerError(f"{PACKAGE} could not be fetched: {words}") from None


def compile_one(compiler: Compiler, source: Path, arch: str, out: Path) -> Path:
    """The code object of a file; its assembly stays beside it. Raises RuntimeError."""
    stem = out / f"{source.stem}.{arch}"
    assembly, thing, code = (Path(f"{stem}.{end}") for end in ("s", "o", "hsaco"))
    includes = [f"-I{KERNELS}", f"-I{KERNELS / 'include'}"]
    if compiler.headers:
        includes += ["-idirafter", compiler.headers]
    run(
        [
            *(*compiler.clang, *FLAGS, *includes, f"--offload-arch={arch}"),
            *("-S", str(source), "-o", str(assembly)),
        ],
        COMPILE_BUDGET_S,
    )
    target = ["--target=amdgcn-amd-amdhsa", f"-mcpu={arch}"]
    run([*compiler.clang, *target, "-c", str(assembly), "-o", str(thing)], COMPILE_BUDGET_S)
    run(
        [*compiler.lld, "-shared", "--no-undefined", str(thing), "-o", str(code)],
        COMPILE_BUDGET_S,
    )
    thing.unlink()
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--find", action="store_true", help="say which compiler is there")
    parser.add_argument("--fetched", type=Path, help="folder of a fetched compiler")
    parser.add_argument("--fetch", action="store_true", help="fetch one where there is none")
    parser.add_argument("--arch", choices=ARCHITECTURES)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("sources", type=Path, nargs="*")
    arguments = parser.parse_args()
    if not arguments.find and not (arguments.arch and arguments.out and arguments.sources):
        parser.error("needed --find, or --arch, --out and files")
    try:
        try:
            compiler = find(arguments.fetched)
        except NoCompilerError:
            if not (arguments.fetch and arguments.fetched):
                raise
            fetch(arguments.fetched)
            compiler = find(arguments.fetched)
    except NoCompilerError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.find:
        print(compiler.version())
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    for source in arguments.sources:
        try:
            compile_one(compiler, source, arguments.arch, arguments.out)
        except RuntimeError as error:
            print(f"{source}, {arguments.arch}:\n{error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
