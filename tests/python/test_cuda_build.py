"""What LOWLAT_CUDA asks of a build, with an nvcc that is too old or says nothing."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGURE_BUDGET_S = 180


def configured(tmp_path: Path, option: str, nvcc_says: str) -> tuple[int, str]:
    """Exit status and words of CMake where the only compiler to be seen says `nvcc_says`."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho '{nvcc_says}'\n")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path / "build"), f"-DLOWLAT_CUDA={option}"]
    command += ["-DLOWLAT_TESTS=OFF", "-DLOWLAT_PYTHON=OFF", "-DLOWLAT_RUST=OFF"]
    done = subprocess.run(
        command,
        env=os.environ | {"CUDACXX": str(nvcc)},
        capture_output=True,
        text=True,
        timeout=CONFIGURE_BUDGET_S,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


OLD = "Cuda compilation tools, release 12.4, V12.4.99"


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (OLD, "is CUDA 12.4; needed 13.0 or newer (set CUDACXX)"),
        ("", "names no release: set CUDACXX to a working nvcc"),
    ],
)
def test_a_build_that_asks_for_cuda_fails_without_it(tmp_path: Path, says: str, words: str) -> None:
    status, seen = configured(tmp_path, "ON", says)
    assert status != 0
    assert "LOWLAT_CUDA=ON, but" in seen and words in seen


def test_a_build_that_takes_what_is_there_says_why_it_is_without(tmp_path: Path) -> None:
    status, seen = configured(tmp_path, "AUTO", OLD)
    assert status == 0
    assert "without CUDA kernels: " in seen and "needed 13.0 or newer" in seen


def test_a_build_without_cuda_looks_for_none(tmp_path: Path) -> None:
    status, seen = configured(tmp_path, "OFF", OLD)
    assert (status, "CUDA" in seen) == (0, False)


def test_any_other_word_is_refused(tmp_path: Path) -> None:
    status, seen = configured(tmp_path, "YES", OLD)
    assert status != 0 and "LOWLAT_CUDA is YES; needed AUTO, ON or OFF" in seen
