"""lowlat.cli.doctor: each line from a stand-in, and the whole of it where lowlat is installed."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from lowlat.cli import doctor, parts
from lowlat.cli.doctor import BROKEN, NONE, OK, Check
from lowlat.cli.main import main
from lowlat.cli.outcome import FaultError
from support import fakes


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def installed(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(doctor, "installed_file", lambda *words: path)


def test_only_what_lowlat_needs_counts_for_its_health() -> None:
    checks = [Check("a", OK, True, "t", "h"), Check("b", BROKEN, False, "t", "h")]
    assert doctor.is_healthy([*checks, Check("c", NONE, False, "t", "h")])
    assert not doctor.is_healthy([*checks, Check("c", BROKEN, True, "t", "h")])


def test_a_line_fits_100_columns_and_says_what_to_change() -> None:
    check = Check("name", BROKEN, True, "try " * 20, "it " * 40, "do " * 10)
    lines = doctor.as_text(check).splitlines()
    assert all(len(line) <= 100 for line in lines) and len(lines) > 2
    assert lines[0].startswith("broken  name ") and "to change it: do" in " ".join(lines)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo first >&2; echo why >&2; exit 3", "exit status 3: why"),
        ("kill -SEGV $$", "died of signal 11"),
        ("sleep 30", "no answer within 1 s"),
    ],
)
def test_a_child_that_does_not_answer_is_words(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(doctor.NoAnswerError, match=words):
        doctor.look([str(program(tmp_path / "tool", body))], budget_s=1)
    with pytest.raises(doctor.NoAnswerError, match="does not start"):
        doctor.look([str(tmp_path / "none")])


@pytest.mark.parametrize("entry", ["modules", "elsewhere:./modules"])
def test_a_child_searches_where_the_caller_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: str
) -> None:
    """Children start in an empty folder, from which a relative $PYTHONPATH leads nowhere: given on
    as it is, this module is not found."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "lying_about.py").write_text("__version__ = '7'\n")
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')\n")
    monkeypatch.chdir(tmp_path)
    # What the parent has from elsewhere the child needs too.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([entry, *filter(None, sys.path)]))
    assert doctor.ask("module", "lying_about")["__version__"] == "7"


def test_a_kernel_library_that_crashes_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, fakes.build(tmp_path, "cuda.c", "FAKE_CRASH"))
    check = doctor.kernels_check()
    assert (check.status, check.needed, check.happened) == (BROKEN, True, "died of signal 6")
    assert "pip install ." in check.change
    installed(monkeypatch, fakes.build(tmp_path, "kernels.c"))
    check = doctor.kernels_check()
    assert check.status == OK and check.happened.startswith("ABI 1, 1 operations")


def test_an_engine_of_another_version_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "version", lambda: "1.2.3")
    installed(monkeypatch, program(tmp_path / "engine", "echo lowlat-engine 1.2.3"))
    assert doctor.engine_check().status == OK
    installed(monkeypatch, program(tmp_path / "engine", "echo lowlat-engine 1.2.4"))
    check = doctor.engine_check()
    assert (check.status, check.happened) == (
        BROKEN,
        "lowlat-engine 1.2.4; the package is 1.2.3",
    )


REPORT = '{"steps": {"target": {"covered": %d}}, "totals": {"output_tokens": %d}}'


@pytest.mark.parametrize(
    ("covered", "tokens", "status"), [(3, 8, OK), (0, 8, BROKEN), (3, 7, BROKEN)]
)
def test_two_ranks_must_run_covered_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, covered: int, tokens: int, status: str
) -> None:
    body = f"mkdir out; echo '{REPORT % (covered, tokens)}' > out/report.json"
    installed(monkeypatch, program(tmp_path / "engine", body))
    assert doctor.ranks_check().status == status


def test_two_ranks_that_fail_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed(monkeypatch, program(tmp_path / "engine", "echo rank 1 is lost >&2; exit 3"))
    check = doctor.ranks_check()
    assert (check.status, check.happened) == (BROKEN, "exit status 3: rank 1 is lost")


def test_a_part_that_is_missing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*words: str) -> Path:
        raise FaultError("not there")

    monkeypatch.setattr(doctor, "installed_file", missing)
    for check in (doctor.kernels_check(), doctor.engine_check(), doctor.ranks_check()):
        assert (check.status, check.happened) == (BROKEN, "not there")


def test_tools_are_found_by_running_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program(tmp_path / "fake-tool", "echo a tool; echo version 4.5")
    check = doctor.tool_check("tool", ["no-such-tool", "fake-tool"], "get it")
    assert (check.status, check.happened, check.change) == (OK, "version 4.5", "")
    program(tmp_path / "fake-tool", "exit 9")
    check = doctor.tool_check("tool", ["fake-tool"], "get it")
    assert (check.status, check.needed, check.change) == (BROKEN, False, "get it")
    assert doctor.tool_check("tool", ["no-such-tool"], "get it").status == NONE


def test_a_compiler_must_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    body = 'case "$1" in --version) echo cc 1.0;; *) echo no such target >&2; exit 1;; esac'
    program(tmp_path / "fake-cc", body)
    check = doctor.compile_check("C", ["fake-cc"], ["--target=x"], "get it")
    assert (check.status, check.happened) == (BROKEN, "exit status 1: no such target")
    program(tmp_path / "fake-cc", "echo cc 1.0")
    assert doctor.compile_check("C", ["fake-cc"], ["--target=x"], "get it").status == OK


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"devices": ["A", "B"]}, OK),
        ({"devices": []}, NONE),
        (doctor.NoAnswerError("libcuda.so.1: cannot open shared object file"), NONE),
        (doctor.NoAnswerError("cuInit gave error 999"), BROKEN),
    ],
)
def test_devices_are_named_missing_or_broken(
    monkeypatch: pytest.MonkeyPatch, answer: dict | Exception, status: str
) -> None:
    def ask(*words: str) -> dict:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(doctor, "ask", ask)
    check = doctor.devices_check("GPUs", "cuda", "libcuda.so.1", "the driver")
    assert (check.status, check.needed) == (status, False)


def test_sglang_and_its_contract_are_read_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert doctor.sglang_check().status in (OK, NONE)
    info = tmp_path / "sglang-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = doctor.sglang_check()
    assert (check.status, check.happened) == (NONE, "9.8.7, no plugin contract")
    spec = tmp_path / "sglang/kernels/plugin_kernels/nvidia/spec.py"
    spec.parent.mkdir(parents=True)
    spec.write_text("raise ImportError\nMEGAKERNEL_API_VERSION: int = 3\n")
    check = doctor.sglang_check()
    assert (check.status, check.happened) == (OK, "9.8.7, plugin contract: nvidia 3")


def test_all_of_it_works_here(capsys: pytest.CaptureFixture) -> None:
    try:
        parts.installed_file("_bin", "lowlat-engine")
        parts.version()
    except FaultError:
        pytest.skip("lowlat is not installed (make build)")
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["healthy"] and answer["schema"] == "lowlat.doctor"
    by_name = {check["name"]: check for check in answer["checks"]}
    assert by_name["two ranks"]["happened"].startswith("8 tokens")
    assert all(check["status"] == OK for check in answer["checks"] if check["needed"])


NVIDIA = {
    "built": True,
    "architectures": "sm_90a",
    "toolkit": "13.0",
    "driver": "13.1",
    "refusal": "",
    "devices": [{"name": "H200", "isa": "sm_90", "refusal": ""}] * 2,
    "peers": [{"from": 0, "to": 1, "refusal": ""}, {"from": 1, "to": 0, "refusal": ""}],
}
AMD = NVIDIA | {
    "architectures": "gfx950, gfx942",
    "toolkit": "libamdhip64.so.7",
    "driver": "",
    "devices": [{"name": "AMD Instinct MI355X", "isa": "gfx950", "refusal": ""}] * 2,
}
NO_HIP = "platform amd needs the HIP runtime, and libamdhip64.so.7 or .6 is not to be found"


@pytest.mark.parametrize(
    ("vendor", "answer", "changes", "status", "words"),
    [
        (
            doctor.NVIDIA,
            NVIDIA,
            {},
            OK,
            "they run on 2; CUDA 13.0, built for sm_90a; driver for CUDA 13.1",
        ),
        (doctor.NVIDIA, NVIDIA, {"built": False, "refusal": ""}, NONE, "the library has none"),
        (
            doctor.NVIDIA,
            NVIDIA,
            {"refusal": "no CUDA-capable device", "devices": []},
            NONE,
            "CUDA 13.0, built for sm_90a; no CUDA-capable device",
        ),
        (
            doctor.NVIDIA,
            NVIDIA,
            {"devices": [{"name": "A100", "isa": "sm_80", "refusal": "no code for it"}]},
            BROKEN,
            "GPU 0 (sm_80): no code for it",
        ),
        (
            doctor.AMD,
            AMD,
            {},
            OK,
            "they run on 2; libamdhip64.so.7, code for gfx950, gfx942",
        ),
        (doctor.AMD, AMD, {"built": False, "refusal": ""}, NONE, "the library has none"),
        (
            doctor.AMD,
            AMD,
            {"toolkit": "", "refusal": NO_HIP, "devices": []},
            NONE,
            f"code for gfx950, gfx942; {NO_HIP}",
        ),
        (
            doctor.AMD,
            AMD,
            {"devices": [{"name": "MI250X", "isa": "", "refusal": "no code for it"}]},
            BROKEN,
            "they run on 0; libamdhip64.so.7, code for gfx950, gfx942; GPU 0: no code for it",
        ),
    ],
)
def test_the_kernels_on_gpus_are_a_line(
    monkeypatch: pytest.MonkeyPatch,
    vendor: doctor.Vendor,
    answer: dict,
    changes: dict,
    status: str,
    words: str,
) -> None:
    installed(monkeypatch, Path("lib.so"))
    monkeypatch.setattr(doctor, "ask", lambda *question: {vendor.word: answer | changes})
    check = next(doctor.gpu_kernels_checks(vendor))
    assert (check.name, check.status, check.needed) == (f"{vendor.name} kernels", status, False)
    assert words in check.happened
    assert bool(check.change) == (status != OK)


@pytest.mark.parametrize(("vendor", "answer"), [(doctor.NVIDIA, NVIDIA), (doctor.AMD, AMD)])
def test_a_store_that_does_not_arrive_names_its_gpus(
    monkeypatch: pytest.MonkeyPatch, vendor: doctor.Vendor, answer: dict
) -> None:
    installed(monkeypatch, Path("lib.so"))
    monkeypatch.setattr(doctor, "ask", lambda *question: {vendor.word: answer})
    _, check = doctor.gpu_kernels_checks(vendor)
    assert (check.status, check.happened) == (OK, "2 of 2 arrived")
    lost = [answer["peers"][0], {"from": 1, "to": 0, "refusal": "the store did not arrive"}]
    monkeypatch.setattr(doctor, "ask", lambda *question: {vendor.word: answer | {"peers": lost}})
    _, check = doctor.gpu_kernels_checks(vendor)
    assert (check.name, check.status) == (f"{vendor.name} peer access", BROKEN)
    assert check.happened == "1 of 2 arrived; 1 to 0: the store did not arrive"
    assert check.change == vendor.joined


def test_fused_kernels_are_listed_with_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = [
        {"name": "moe_sm90", "shapes": "v4 tp2, v41 tp4", "rows": "1..64"},
        {"name": "mix_sm90", "shapes": "v4", "rows": "1..48"},
    ]
    installed(monkeypatch, Path("lib.so"))
    monkeypatch.setattr(doctor, "ask", lambda *question: {"nvidia": NVIDIA | {"fused": fused}})
    _, check, _ = doctor.gpu_kernels_checks(doctor.NVIDIA)
    assert (check.name, check.status, check.needed) == ("fused kernels", OK, False)
    assert check.happened == "moe_sm90 (v4 tp2, v41 tp4; 1..64); mix_sm90 (v4; 1..48)"


def test_a_library_without_kernels_for_gpus_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, fakes.build(tmp_path, "kernels.c"))
    for vendor in (doctor.NVIDIA, doctor.AMD):
        (check,) = doctor.gpu_kernels_checks(vendor)
        assert (check.status, check.happened) == (NONE, "the library has none")
        assert check.change == vendor.build
