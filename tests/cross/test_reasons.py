"""The numbered reasons: Rust's list, the C header's and Python's are one list."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUST = ROOT / "rust_dispatch" / "core" / "src" / "reason.rs"
HEADER = ROOT / "rust_dispatch" / "capi" / "include" / "lowlat" / "dispatch.h"


def in_rust() -> dict[str, int]:
    """Variant, in snake case: number."""
    body = re.search(r"pub enum Reason \{(.*?)^\}", RUST.read_text(), re.DOTALL | re.MULTILINE)
    assert body
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): int(number)
        for name, number in re.findall(r"^\s+(\w+) = (\d+),", body[1], re.MULTILINE)
    }


def in_c() -> dict[str, int]:
    return {
        name.lower(): int(number)
        for name, number in re.findall(
            r"\bLOWLAT_REASON_(\w+)\s*=\s*(\d+)", HEADER.read_text(), re.MULTILINE
        )
    }


def test_the_list_is_there_and_no_number_is_given_twice() -> None:
    numbers = list(in_rust().values())
    assert len(numbers) > 20
    assert len(set(numbers)) == len(numbers)


def test_c_has_the_same_numbers() -> None:
    assert in_c() == in_rust()


def test_python_has_the_same_numbers() -> None:
    dispatch = pytest.importorskip("lowlat._dispatch", reason="lowlat is not built (make build)")
    seen = {name: number for number, name, _ in dispatch.reasons()}
    assert seen == in_rust()
    assert all(words and "\n" not in words for _, _, words in dispatch.reasons())
