"""The installed package: what it holds, what an import costs, that the command starts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lowlat.cli import parts
from lowlat.cli.outcome import FaultError

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 60


def python(*words: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *words],
        env=dict(os.environ, **env),
        capture_output=True,
        text=True,
        timeout=BUDGET_S,
        check=False,
    )


def test_import_loads_nothing_reads_nothing_and_writes_nothing() -> None:
    code = """
import os, sys
before = set(sys.modules)
class Watched(dict):
    def __getitem__(self, key): raise SystemExit(f"reads {key}")
    get = __contains__ = __getitem__
sys.dont_write_bytecode = True
real, os.environ = os.environ, Watched()
import lowlat
os.environ = real
new = {name for name in set(sys.modules) - before if not name.startswith("lowlat")}
print(sorted(new), [name for name in sys.modules if name.startswith("lowlat.")])
"""
    done = python("-c", code)
    assert done.stdout == "[] []\n", done.stdout + done.stderr


def test_the_commands_module_loads_no_numpy_and_no_library() -> None:
    code = (
        "import sys, lowlat.cli.main\n"
        "print([m for m in sys.modules if m in ('numpy', 'lowlat._kernels', 'lowlat._dispatch')])"
    )
    assert python("-c", code).stdout == "[]\n"


def test_python_m_is_the_command() -> None:
    done = python("-m", "lowlat", "op")
    assert done.returncode == 2
    assert done.stderr == "lowlat: op needs NAME, --in FILE, --out FILE (lowlat op --help)\n"


def test_the_command_starts() -> None:
    command = shutil.which("lowlat", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("lowlat is not installed (make build)")
    done = subprocess.run(
        [command, "--version"], capture_output=True, text=True, timeout=BUDGET_S, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("lowlat ")


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m lowlat --help | true"],
        capture_output=True,
        text=True,
        timeout=BUDGET_S,
        check=False,
    )
    assert "Traceback" not in done.stderr


def test_the_version_is_the_workspaces() -> None:
    try:
        version = parts.version()
    except FaultError:
        pytest.skip("lowlat is not installed (make build)")
    assert f'\nversion = "{version}"\n' in (ROOT / "Cargo.toml").read_text()


@pytest.mark.parametrize(
    "file",
    [
        ("_lib", "liblowlat_kernels.so"),
        ("_bin", "lowlat-engine"),
        ("_bench", "baseline_layer.py"),
        ("_dispatch.abi3.so",),
    ],
)
def test_the_wheel_holds_every_built_part(file: tuple[str, ...]) -> None:
    try:
        parts.version()
    except FaultError:
        pytest.skip("lowlat is not installed (make build)")
    path = parts.installed_file(*file)
    assert path.stat().st_size > 0


def test_the_kernel_library_exports_the_c_abi_only() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    try:
        library = parts.installed_file("_lib", "liblowlat_kernels.so")
    except FaultError:
        pytest.skip("lowlat is not installed (make build)")
    done = subprocess.run(
        [nm, "-D", "--defined-only", library],
        capture_output=True,
        text=True,
        timeout=BUDGET_S,
        check=True,
    )
    exported = {line.split()[-1] for line in done.stdout.splitlines()}
    header = (ROOT / "cpp_kernels/include/lowlat/kernels.h").read_text()
    declared = {
        word.split("(")[0].split()[-1].lstrip("*")
        for word in header.split("LOWLAT_API ")[1:]
        if "(" in word.split(";")[0]
    }
    declared = {name for name in declared if name.startswith("lowlat_")}
    assert len(declared) > 20
    assert exported == declared


def test_a_part_that_is_missing_says_what_to_do() -> None:
    with pytest.raises(FaultError, match="install it again"):
        parts.installed_file("_lib", "nothing.so")
    with pytest.raises(FaultError, match="install lowlat again"):
        parts.native("_nothing")
