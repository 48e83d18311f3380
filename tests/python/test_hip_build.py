"""What LOWLAT_HIP asks of a build, with a clang that is too old."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGURE_BUDGET_S = 180


def configured(tmp_path: Path, option: str) -> tuple[int, str]:
    """Exit status and words of CMake where the compiler that it is to take is clang 19."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    clang = tmp_path / "clang"
    clang.write_text("#!/bin/sh\necho 'clang version 19.1.7'\n")
    clang.chmod(clang.stat().st_mode | stat.S_IXUSR)
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path / "build"), f"-DLOWLAT_HIP={option}"]
    command += ["-DLOWLAT_CUDA=OFF", "-DLOWLAT_TESTS=OFF", "-DLOWLAT_PYTHON=OFF"]
    done = subprocess.run(
        [*command, "-DLOWLAT_RUST=OFF"],
        env=os.environ | {"LOWLAT_HIP_CLANG": str(clang)},
        capture_output=True,
        text=True,
        timeout=CONFIGURE_BUDGET_S,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


NEEDED = "needed clang 22 or newer with its ld.lld"


def test_a_build_that_asks_for_amd_code_fails_without_a_compiler(tmp_path: Path) -> None:
    status, seen = configured(tmp_path, "ON")
    assert status != 0
    assert "LOWLAT_HIP=ON, but LOWLAT_HIP_CLANG is" in seen and NEEDED in seen


def test_a_build_that_takes_what_is_there_says_why_it_is_without(tmp_path: Path) -> None:
    status, seen = configured(tmp_path, "AUTO")
    assert status == 0
    assert "without AMD code objects: " in seen and NEEDED in seen


def test_a_build_without_amd_code_looks_for_no_compiler(tmp_path: Path) -> None:
    status, seen = configured(tmp_path, "OFF")
    assert (status, "AMD" in seen) == (0, False)


def test_any_other_word_is_refused(tmp_path: Path) -> None:
    status, seen = configured(tmp_path, "YES")
    assert status != 0 and "LOWLAT_HIP is YES; needed AUTO, ON or OFF" in seen
