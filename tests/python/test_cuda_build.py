"""What LOWLAT_CUDA asks of a build, with an nvcc that is too old or says nothing."""

from pathlib import Path

import pytest
from support.configured import configured

OLD = "Cuda compilation tools, release 12.4, V12.4.99"


def with_nvcc(tmp_path: Path, option: str, says: str) -> tuple[int, str]:
    return configured(tmp_path, {"LOWLAT_CUDA": option}, "CUDACXX", says)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (OLD, "is CUDA 12.4; needed 13.0 or newer (set CUDACXX)"),
        ("", "names no release: set CUDACXX to a working nvcc"),
    ],
)
def test_a_build_that_asks_for_cuda_fails_without_it(tmp_path: Path, says: str, words: str) -> None:
    status, seen = with_nvcc(tmp_path, "ON", says)
    assert status != 0
    assert "LOWLAT_CUDA=ON, but" in seen and words in seen


def test_a_build_that_takes_what_is_there_says_why_it_is_without(tmp_path: Path) -> None:
    status, seen = with_nvcc(tmp_path, "AUTO", OLD)
    assert status == 0
    assert "without CUDA kernels: " in seen and "needed 13.0 or newer" in seen


def test_a_build_without_cuda_looks_for_none(tmp_path: Path) -> None:
    status, seen = with_nvcc(tmp_path, "OFF", OLD)
    assert (status, "CUDA" in seen) == (0, False)


def test_any_other_word_is_refused(tmp_path: Path) -> None:
    status, seen = with_nvcc(tmp_path, "YES", OLD)
    assert status != 0 and "LOWLAT_CUDA is YES; needed AUTO, ON or OFF" in seen
