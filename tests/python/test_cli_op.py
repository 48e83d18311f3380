"""lowlat.cli.op: files, dtypes, words and exit statuses. The kernels are a fake with one operation,
so that every answer of the library can be had; test_kernels.py asks the real ones."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lowlat.cli.main import main

SCALE = {
    "name": "scale",
    "models": "v41",
    "about": "x times by",
    "in": [
        {"name": "x", "dtype": "f32", "shape": "T,H", "optional": False, "about": "rows"},
        {"name": "code", "dtype": "e4m3", "shape": "H", "optional": True, "about": "codes"},
        {"name": "by", "dtype": "i64", "shape": "", "optional": False, "about": "factor"},
    ],
    "out": [{"name": "y", "dtype": "f32", "shape": "T,H", "about": "product"}],
    "numerics": {"scalar": {"y": "bitwise"}},
}


class FakeKernels(SimpleNamespace):
    """Records what it was asked; `error` is raised instead of an answer."""

    error: Exception | None = None
    asked: tuple | None = None

    def op_list(self) -> str:
        return json.dumps([SCALE])

    def run_op(
        self, op: str, model: str, platform: str, inputs: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        self.asked = (op, model, platform, sorted(inputs))
        if self.error:
            raise self.error
        return {"y": inputs["x"] * inputs["by"].astype(np.float32)}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    fake = FakeKernels()
    monkeypatch.setitem(sys.modules, "lowlat._kernels", fake)
    return fake


@pytest.fixture
def case(tmp_path: Path) -> dict:
    return {"x": np.ones((2, 3), np.float32), "by": np.int64(4)}


def run(tmp_path: Path, arrays: dict, *more: str) -> int:
    np.savez(tmp_path / "case.npz", **arrays)
    files = ["--in", str(tmp_path / "case.npz")]
    if "--out" not in more:  # an option is given once
        files += ["--out", str(tmp_path / "out.npz")]
    return main(["op", "scale", *files, *more])


def one_line(capsys: pytest.CaptureFixture) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("lowlat: ")
    return captured.err


def test_runs_and_writes(kernels: FakeKernels, tmp_path: Path, case: dict) -> None:
    assert run(tmp_path, case) == 0
    assert kernels.asked == ("scale", "v41", "scalar", ["by", "x"])
    with np.load(tmp_path / "out.npz") as out:
        assert np.array_equal(out["y"], np.full((2, 3), 4, np.float32))


def test_passes_platform_and_model_on(kernels: FakeKernels, tmp_path: Path, case: dict) -> None:
    assert run(tmp_path, case, "--platform", "reference", "--model", "v4") == 0
    assert kernels.asked[:3] == ("scale", "v4", "reference")


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("x", np.ones((2, 3)), "array x is float64; needed float32"),
        ("x", np.ones((2, 3), ">f4"), "array x is big-endian float32; needed float32"),
        ("x", np.ones((2, 3), bool), "array x is bool; needed float32"),
        ("x", np.array([["a"]]), "array x is <U1; needed float32"),
        ("by", np.int32(4), "array by is int32; needed int64"),
        ("code", np.ones(3, np.float32), "array code is float32; needed uint8 (e4m3 codes)"),
    ],
)
def test_refuses_another_dtype(
    kernels: FakeKernels,
    tmp_path: Path,
    case: dict,
    capsys: pytest.CaptureFixture,
    name: str,
    array: np.ndarray,
    words: str,
) -> None:
    assert run(tmp_path, case | {name: array}) == 1
    line = one_line(capsys)
    assert words in line and "case.npz" in line
    assert kernels.asked is None
    assert not (tmp_path / "out.npz").exists()


def test_what_the_library_refuses_is_one_line_with_the_file(
    kernels: FakeKernels, tmp_path: Path, case: dict, capsys: pytest.CaptureFixture
) -> None:
    kernels.error = ValueError("x has shape [2, 3]; needed\n[T, 32]")
    assert run(tmp_path, case) == 1
    assert "case.npz: x has shape [2, 3]; needed [T, 32]" in one_line(capsys)
    assert not (tmp_path / "out.npz").exists()


def test_a_platform_that_is_not_there_is_no_complaint_about_the_file(
    kernels: FakeKernels, tmp_path: Path, case: dict, capsys: pytest.CaptureFixture
) -> None:
    kernels.error = ValueError("platform is tpu; this build has reference and scalar")
    assert run(tmp_path, case, "--platform", "tpu") == 1
    words = "lowlat: scale: platform is tpu; this build has reference and scalar\n"
    assert capsys.readouterr().err == words


def test_a_fault_of_the_library_is_status_3(
    kernels: FakeKernels, tmp_path: Path, case: dict, capsys: pytest.CaptureFixture
) -> None:
    kernels.error = RuntimeError("wait expired")
    assert run(tmp_path, case) == 3
    assert "wait expired" in one_line(capsys)


def test_a_bug_is_a_line_and_no_traceback(
    kernels: FakeKernels, tmp_path: Path, case: dict, capsys: pytest.CaptureFixture
) -> None:
    kernels.error = KeyError("oops")
    assert run(tmp_path, case) == 3
    assert "bug: KeyError" in one_line(capsys)


def test_a_file_that_cannot_be_read_is_refused(
    kernels: FakeKernels, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = str(tmp_path / "out.npz")
    assert main(["op", "scale", "--in", str(tmp_path / "no.npz"), "--out", out]) == 1
    assert "no.npz: no such file" in one_line(capsys)


@pytest.mark.parametrize("out", ["", "nowhere/out.npz"])
def test_an_output_that_is_no_file_is_refused_before_the_run(
    kernels: FakeKernels, tmp_path: Path, case: dict, capsys: pytest.CaptureFixture, out: str
) -> None:
    assert run(tmp_path, case, "--out", str(tmp_path / out)) == 1
    assert "needed the path of a file" in one_line(capsys)
    assert kernels.asked is None


def test_a_pipe_as_output_is_refused_and_stays(
    kernels: FakeKernels, tmp_path: Path, case: dict, capsys: pytest.CaptureFixture
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert run(tmp_path, case, "--out", str(tmp_path / "pipe")) == 1
    assert "needed the path of a file" in one_line(capsys)
    assert (tmp_path / "pipe").is_fifo()


def test_the_input_is_no_output(
    kernels: FakeKernels, tmp_path: Path, case: dict, capsys: pytest.CaptureFixture
) -> None:
    np.savez(tmp_path / "in.npz", **case)
    path = str(tmp_path / "in.npz")
    assert main(["op", "scale", "--in", path, "--out", path]) == 1
    assert "in.npz: is the input too" in one_line(capsys)
    assert kernels.asked is None


def test_an_output_name_that_is_too_long_is_refused(
    kernels: FakeKernels, tmp_path: Path, case: dict, capsys: pytest.CaptureFixture
) -> None:
    assert run(tmp_path, case, "--out", str(tmp_path / ("x" * 300))) == 1
    assert "cannot be written: File name too long" in one_line(capsys)


def test_an_unknown_operation_is_refused_with_the_known_ones(
    kernels: FakeKernels, capsys: pytest.CaptureFixture
) -> None:
    assert main(["op", "scael", "--in", "a.npz", "--out", "b.npz"]) == 1
    assert "no operation 'scael'; there are scale" in one_line(capsys)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "op needs NAME, --in FILE, --out FILE"),
        (["scale", "--out", "o"], "op needs --in FILE"),
        (["scale", "--json"], "--json goes with --list"),
        (["--list", "--in", "x"], "--list takes no --in"),
        (["scale", "--input", "x"], "unrecognized arguments"),
    ],
)
def test_wrong_usage_is_status_2(
    kernels: FakeKernels, capsys: pytest.CaptureFixture, words: list[str], complaint: str
) -> None:
    assert main(["op", *words]) == 2
    assert complaint in one_line(capsys)


def test_arrays_are_held_to_the_entry_of_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: dict, capsys: pytest.CaptureFixture
) -> None:
    kernels = FakeKernels()
    codes = [{**SCALE["in"][0], "dtype": "e4m3"}, *SCALE["in"][1:]]
    entries = [SCALE | {"models": "v4", "in": codes}, SCALE]
    kernels.op_list = lambda: json.dumps(entries)
    monkeypatch.setitem(sys.modules, "lowlat._kernels", kernels)
    assert run(tmp_path, case) == 0
    assert run(tmp_path, case, "--model", "v4") == 1
    assert "array x is float32; needed uint8 (e4m3 codes)" in one_line(capsys)
    case["x"] = case["x"].astype(np.uint8)
    assert run(tmp_path, case, "--model", "v4") == 0
    assert main(["op", "scale", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == entries
    assert main(["op", "--list", "--json", "--model", "v4"]) == 0
    assert json.loads(capsys.readouterr().out) == entries[:1]
    assert main(["op", "--list", "--model", "v5"]) == 1
    assert one_line(capsys) == "lowlat: --model is v5; there are operations of v4, v41\n"
    assert main(["op", "scales", "--list"]) == 1
    assert "there are scale\n" in one_line(capsys)


def test_lists_for_people(kernels: FakeKernels, capsys: pytest.CaptureFixture) -> None:
    assert main(["op", "--list"]) == 0
    assert capsys.readouterr().out == (
        "scale (v41)\n"
        "    x times by\n"
        "    in  x f32[T,H]: rows\n"
        "    in  code e4m3[H] (optional): codes\n"
        "    in  by i64[]: factor\n"
        "    out y f32[T,H]: product\n"
        "    numerics scalar y: bitwise\n"
    )


def test_lists_as_json(kernels: FakeKernels, capsys: pytest.CaptureFixture) -> None:
    assert main(["op", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [SCALE]


def test_lists_one(kernels: FakeKernels, capsys: pytest.CaptureFixture) -> None:
    assert main(["op", "scale", "--list"]) == 0
    assert capsys.readouterr().out.startswith("scale (v41)")


def test_a_missing_native_part_is_a_fault_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "lowlat._kernels", None)
    assert main(["op", "--list"]) == 3
    assert "install lowlat again" in one_line(capsys)
