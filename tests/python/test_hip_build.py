"""What LOWLAT_HIP asks of a build, with a clang that is too old."""

from pathlib import Path

from support.configured import configured

NEEDED = "needed clang 22 or newer with its ld.lld"


def with_clang_19(tmp_path: Path, option: str) -> tuple[int, str]:
    options = {"LOWLAT_HIP": option, "LOWLAT_CUDA": "OFF"}
    return configured(tmp_path, options, "LOWLAT_HIP_CLANG", "clang version 19.1.7")


def test_a_build_that_asks_for_amd_code_fails_without_a_compiler(tmp_path: Path) -> None:
    status, seen = with_clang_19(tmp_path, "ON")
    assert status != 0
    assert "LOWLAT_HIP=ON, but LOWLAT_HIP_CLANG is" in seen and NEEDED in seen


def test_a_build_that_takes_what_is_there_says_why_it_is_without(tmp_path: Path) -> None:
    status, seen = with_clang_19(tmp_path, "AUTO")
    assert status == 0
    assert "without AMD code objects: " in seen and NEEDED in seen


def test_a_build_without_amd_code_looks_for_no_compiler(tmp_path: Path) -> None:
    status, seen = with_clang_19(tmp_path, "OFF")
    assert (status, "AMD" in seen) == (0, False)


def test_any_other_word_is_refused(tmp_path: Path) -> None:
    status, seen = with_clang_19(tmp_path, "YES")
    assert status != 0 and "LOWLAT_HIP is YES; needed AUTO, ON or OFF" in seen
