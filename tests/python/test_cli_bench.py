"""lowlat.cli.bench: what it asks of the measuring programs, prints, stores and compares, over
programs that answer as a test wants. The lines are those of tests/cpp/bench/test_report.cpp."""

import json
import sys
from pathlib import Path

import pytest
from lowlat.cli import bench, engine, measure, parts
from lowlat.cli.main import main
from lowlat.cli.outcome import FaultError

MACHINE = {
    "kind": "machine",
    "gpu": "NVIDIA H200",
    "gpus": 1,
    "clock_mhz": 1980,
    "read_bytes_per_s": 4.5e12,
    "cuda": "13.0, driver for 13.0",
}
FIGURE = {
    "kind": "figure",
    "arm": "lowlat",
    "name": "layer",
    "model": "v41",
    "schedule": "fused",
    "tp": 4,
    "gpus": 1,
    "rows": 6,
    "unit": "us",
    "median": 80.0,
    "low": 79.6,
    "high": 80.8,
    "repeats": 60,
    "bytes": 225e6,
    "floor": 50.0,
    "share": 0.625,
    "words": "",
}
BASELINE = {**FIGURE, "arm": "baseline", "median": 200.0, "low": 199.0, "high": 202.0}
for _name in ("schedule", "bytes", "floor", "share"):
    del BASELINE[_name]
CHECK = {"kind": "check", "name": "residual", "good": True, "words": "rel_l2 3e-4"}


class Programs:
    """Stand-ins for lowlat/_bench: what they print, and the words that they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answer(self, name: str, lines: list, status: int = 0, before: str = "") -> None:
        text = "".join(
            f"{json.dumps(line) if isinstance(line, dict) else line}\n" for line in lines
        )
        words = str(self.folder / f"{name}.words")
        script = (
            f"import pathlib, sys, time\n{before}\n"
            f"pathlib.Path({words!r}).write_text('\\n'.join(sys.argv[1:]))\n"
            f"print({text!r}, end='')\nsys.exit({status})\n"
        )
        path = self.folder / name
        start = "" if name.endswith(".py") else f"#!{sys.executable}\n"
        path.write_text(start + script)
        path.chmod(0o755)

    def words(self, name: str) -> list[str]:
        return (self.folder / f"{name}.words").read_text().split("\n")

    def find(self, *parts: str) -> Path:
        path = self.folder / parts[-1]
        if parts[0] != measure.ROOM or not path.is_file():
            raise FaultError(f"{'/'.join(parts)} is missing")
        return path


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    folder = tmp_path / "programs"
    folder.mkdir()
    fake = Programs(folder)
    monkeypatch.setattr(measure, "installed_file", fake.find)
    monkeypatch.setattr(bench, "installed_file", fake.find)
    monkeypatch.setattr(bench, "version", lambda: "1.2.3")
    fake.answer("layer", [MACHINE, CHECK, FIGURE])
    fake.answer("baseline_layer.py", [BASELINE])
    return fake


def test_prints_floor_share_and_the_baseline_of_the_same_run(
    programs: Programs, capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", "layer"]) == 0
    assert capsys.readouterr().out == (
        "1 x NVIDIA H200, 1980 MHz, read 4.5 TB/s, CUDA 13.0, driver for 13.0\n"
        "ok   residual rel_l2 3e-4\n"
        "layer v41 fused tp4 T=6   median 80.00 us  low 79.60  high 80.80"
        "  225.0 MB  floor 50.0  share 0.62\n"
        "    baseline  median 200.00 us  low 199.00  high 202.00  2.50 x ours\n"
    )
    case = ["--model", "v41", "--tp", "4", "--gpus", "1", "--rows", "6"]
    assert programs.words("layer") == [*case, "--schedule", "fused", "--repeats", "60"]
    assert programs.words("baseline_layer.py") == [*case, "--what", "layer", "--repeats", "60"]


def test_a_case_reaches_the_program_of_its_layers(
    programs: Programs, capsys: pytest.CaptureFixture
) -> None:
    programs.answer("layer_v4", [MACHINE, {**FIGURE, "name": "layer of ratio 4", "model": "v4"}])
    words = ["--model", "v4", "--rows", "1,12", "--tp", "2", "--gpus", "2", "--repeats", "20"]
    assert main(["bench", "layer", *words, "--schedule", "persistent"]) == 0
    case = ["--model", "v4", "--tp", "2", "--gpus", "2", "--rows", "1,12"]
    assert programs.words("layer_v4") == [*case, "--schedule", "persistent", "--repeats", "20"]
    # Nothing of the baseline arm is the same work, so it does not run.
    assert not (programs.folder / "baseline_layer.py.words").exists()
    said = capsys.readouterr().out
    assert "no baseline arm: its layer has 640 keys" in said and "x ours" not in said


def test_the_persistent_layer_has_a_program_of_its_own(programs: Programs) -> None:
    programs.answer("layer_resident", [MACHINE, {**FIGURE, "schedule": "persistent", "tp": 2}])
    words = ["--schedule", "persistent", "--tp", "2", "--gpus", "2", "--no-baseline"]
    assert main(["bench", "layer", *words]) == 0
    case = ["--model", "v41", "--tp", "2", "--gpus", "2", "--rows", "6"]
    how = ["--schedule", "persistent", "--repeats", "60"]
    assert programs.words("layer_resident") == [*case, *how]


def test_an_exchange_is_between_two_gpus(programs: Programs) -> None:
    exchange = {**FIGURE, "name": "exchange", "tp": 2, "gpus": 2, "rows": 12, "median": 2.5}
    programs.answer("exchange", [MACHINE, exchange])
    programs.answer("baseline_layer.py", [{**BASELINE, "name": "exchange", "tp": 2, "gpus": 2}])
    assert main(["bench", "exchange"]) == 0
    case = ["--model", "v41", "--tp", "2", "--gpus", "2", "--rows", "12"]
    assert programs.words("exchange")[: len(case)] == case
    assert programs.words("baseline_layer.py")[-4:] == ["--what", "exchange", "--repeats", "60"]


def test_on_scalar_the_program_brings_its_baseline(
    programs: Programs, capsys: pytest.CaptureFixture
) -> None:
    machine = {**MACHINE, "gpu": "a CPU", "clock_mhz": 0, "cuda": "", "read_bytes_per_s": 2e10}
    own = {**FIGURE, "schedule": "persistent", "tp": 2}
    programs.answer("layer_scalar", [machine, own, {**own, "arm": "baseline", "median": 120.0}])
    assert main(["bench", "layer", "--platform", "scalar", "--tp", "2"]) == 0
    case = ["--model", "v41", "--tp", "2", "--gpus", "1", "--rows", "6"]
    how = ["--schedule", "persistent", "--repeats", "60"]
    assert programs.words("layer_scalar") == [*case, *how]
    assert not (programs.folder / "baseline_layer.py.words").exists()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 x a CPU, read 0.02 TB/s" and len(lines) == 3
    assert lines[2].endswith("1.50 x ours")


def test_the_real_layer_on_scalar(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """End to end: the program that the build installed, its words, its lines, the file."""
    try:
        parts.installed_file(measure.ROOM, "layer_scalar")
    except FaultError:
        pytest.skip("lowlat is not installed (make build)")
    path = tmp_path / "layer.json"
    words = ["bench", "layer", "--platform", "scalar", "--rows", "2", "--repeats", "10"]
    assert main([*words, "--json", str(path)]) == 0
    assert "ok   both schedules choose the same tokens T=2" in capsys.readouterr().out
    (figure,) = json.loads(path.read_text())["figures"]
    assert (figure["schedule"], figure["rows"], figure["repeats"]) == ("persistent", 2, 10)
    assert figure["baseline"]["schedule"] == "plain" and figure["bytes"] > 0
    # Another model's layer is not there: the program's refusal is the command's.
    assert main([*words, "--model", "v4"]) == 1
    assert "is of --model v41 --schedule persistent, not --model v4" in capsys.readouterr().err


def test_json_holds_everything(programs: Programs, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert main(["bench", "layer", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["schema"], report["schema_version"]) == ("lowlat.bench", 1)
    assert (report["what"], report["version"]) == ("layer", "1.2.3")
    assert report["machine"]["read_bytes_per_s"] == 4.5e12 and "kind" not in report["machine"]
    assert report["checks"][0]["name"] == "residual"
    (figure,) = report["figures"]
    assert (figure["median"], figure["floor"], figure["ratio"]) == (80.0, 50.0, 2.5)
    assert figure["baseline"]["median"] == 200.0


def test_a_baseline_of_other_work_is_not_joined(
    programs: Programs, capsys: pytest.CaptureFixture
) -> None:
    programs.answer("baseline_layer.py", [{**BASELINE, "rows": 12}])
    assert main(["bench", "layer"]) == 0
    assert "x ours" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        ([{"kind": "refusal", "words": "No module named 'torch'"}], 1, "No module named 'torch'"),
        (["Traceback", "RuntimeError: no kernel"], 1, "Traceback RuntimeError: no kernel"),
        ([], 139, "ended with status 139"),
        ([], 0, "it gave no figure"),
    ],
)
def test_without_a_baseline_the_figures_stand_alone(
    programs: Programs, capsys: pytest.CaptureFixture, lines: list, status: int, words: str
) -> None:
    programs.answer("baseline_layer.py", lines, status)
    assert main(["bench", "layer"]) == 0
    out = capsys.readouterr().out
    assert "median 80.00" in out and out.splitlines()[-1].startswith("no baseline arm: ")
    assert words in out


def test_no_baseline_runs_none(programs: Programs, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "layer", "--no-baseline"]) == 0
    assert not (programs.folder / "baseline_layer.py.words").exists()
    assert "no baseline arm: not asked for" in capsys.readouterr().out


def test_a_python_that_is_not_there(programs: Programs, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "layer", "--python", "/no/such/python"]) == 0
    assert "the baseline arm does not start" in capsys.readouterr().out


# ------------------------------------------------------------------ refusals and faults


def test_a_build_without_cuda_is_refused_in_one_line(
    programs: Programs, capsys: pytest.CaptureFixture
) -> None:
    (programs.folder / "layer").unlink()
    assert main(["bench", "layer"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "needs kernels for NVIDIA GPUs" in captured.err and "LOWLAT_PIP_CUDA=1" in captured.err


def test_refusals_name_what_was_asked_for_and_not_the_program(
    programs: Programs, capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", "layer", "--model", "v4"]) == 1
    assert capsys.readouterr().err.startswith("lowlat: bench layer needs kernels")
    programs.answer("layer_v4", [{"kind": "refusal", "words": "only --tp 4"}], 1)
    assert main(["bench", "layer", "--model", "v4"]) == 1
    assert capsys.readouterr().err == "lowlat: bench layer: only --tp 4\n"


def test_the_programs_refusal_is_ours(
    programs: Programs, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    programs.answer("layer", [{"kind": "refusal", "words": "needs an NVIDIA GPU: no driver"}], 1)
    assert main(["bench", "layer", "--json", str(tmp_path / "a.json")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "lowlat: bench layer: needs an NVIDIA GPU: no driver\n"
    assert not (tmp_path / "a.json").exists()


def test_a_wrong_result_has_no_time(
    programs: Programs, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    wrong = {**CHECK, "good": False, "words": "off by 2"}
    programs.answer("layer", [MACHINE, CHECK, wrong, FIGURE], 1)
    assert main(["bench", "layer", "--json", str(tmp_path / "a.json")]) == 1
    captured = capsys.readouterr()
    assert "WRONG residual off by 2" in captured.out and "median" not in captured.out
    assert "1 of 2 results are wrong" in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize(
    ("lines", "status", "words"),
    [
        ([MACHINE, FIGURE], 3, "ended with status 3"),
        (["out of memory"], 2, "ended with status 2: out of memory"),
        ([FIGURE], 0, "named no machine"),
        ([MACHINE, '{"kind": "figure"'], 0, "line 2: no JSON"),
        ([MACHINE, {"kind": "song"}], 0, "kind is 'song'"),
        ([MACHINE, {**FIGURE, "median": None}], 0, "figure has median None"),
        ([{**MACHINE, "gpu": 7}], 0, "machine has gpu 7"),
    ],
)
def test_a_program_that_breaks_its_word_is_a_fault(
    programs: Programs, capsys: pytest.CaptureFixture, lines: list, status: int, words: str
) -> None:
    programs.answer("layer", lines, status)
    assert main(["bench", "layer"]) == 3
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1


def test_a_program_that_hangs_is_stopped(
    programs: Programs, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.answer("layer", [], before="time.sleep(60)")
    monkeypatch.setattr(measure.run, "__defaults__", (0.5,))
    assert main(["bench", "layer"]) == 3
    assert "did not end within 0.5 s and was stopped" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["bench"],
        ["bench", "step"],
        ["bench", "layer", "--rows", "0"],
        ["bench", "layer", "--rows", "49"],
        ["bench", "layer", "--rows", "6,6"],
        ["bench", "layer", "--rows", "6,"],
        ["bench", "layer", "--rows", "\u0666"],
        ["bench", "layer", "--tp", "3"],
        ["bench", "layer", "--gpus", "2"],
        ["bench", "layer", "--tp", "2", "--gpus", "4"],
        ["bench", "layer", "--repeats", "9"],
        ["bench", "layer", "--model", "v5"],
        ["bench", "layer", "--schedule", "mono"],
        ["bench", "layer", "--platform", "amd"],
        ["bench", "draft", "--platform", "scalar"],
        ["bench", "layer", "--platform", "scalar", "--gpus", "2"],
    ],
)
def test_wrong_usage(programs: Programs, capsys: pytest.CaptureFixture, words: list[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (programs.folder / "layer.words").exists()


# ------------------------------------------------------------------ against an earlier run


def earlier(programs: Programs, path: Path, **changes: object) -> Path:
    """A file of a run whose figure had these values."""
    programs.answer("layer", [MACHINE, {**FIGURE, **changes}])
    assert main(["bench", "layer", "--json", str(path)]) == 0
    programs.answer("layer", [MACHINE, CHECK, FIGURE])
    return path


def test_slower_than_the_noise_fails_and_is_written(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    old = earlier(programs, tmp_path / "old.json", median=78.0, low=77.8, high=78.2)
    new = tmp_path / "new.json"
    assert main(["bench", "layer", "--against", str(old), "--json", str(new)]) == 1
    captured = capsys.readouterr()
    assert "+2.6 % against 78.00 in old.json, noise 2.0 %: SLOWER" in captured.out
    assert captured.err == f"lowlat: slower than {old}: layer T=6\n"
    assert json.loads(new.read_text())["figures"][0]["against"]["slower"] is True


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"median": 79.0, "low": 78.9, "high": 79.1}, "noise 2.0 %: within"),
        # A spread of 5 % in either run is that much noise.
        ({"median": 78.0, "low": 76.0, "high": 80.0}, "noise 5.1 %: within"),
        ({"median": 90.0, "low": 89.9, "high": 90.1}, "noise 2.0 %: faster"),
    ],
)
def test_within_the_noise_passes(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture, changes: dict, state: str
) -> None:
    old = earlier(programs, tmp_path / "old.json", **changes)
    assert main(["bench", "layer", "--against", str(old)]) == 0
    assert state in capsys.readouterr().out


def test_only_the_same_work_is_compared(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    old = earlier(programs, tmp_path / "old.json", median=10.0, low=9.9, high=10.1, rows=12)
    assert main(["bench", "layer", "--against", str(old)]) == 1
    assert "has none of these figures" in capsys.readouterr().err
    programs.answer("layer", [MACHINE, FIGURE, {**FIGURE, "rows": 12, "median": 10.0, "low": 9.9,
                                                "high": 10.1}])  # fmt: skip
    assert main(["bench", "layer", "--against", str(old)]) == 0
    assert f"not in {old}" in capsys.readouterr().out


def test_another_gpu_is_refused(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    old = earlier(programs, tmp_path / "old.json")
    programs.answer("layer", [{**MACHINE, "gpu": "NVIDIA H100"}, FIGURE])
    assert main(["bench", "layer", "--against", str(old)]) == 1
    assert "is of NVIDIA H200, and this is NVIDIA H100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ("[]", "no lowlat.bench file"),
        ('{"schema": "lowlat.bench", "schema_version": 2}', "schema_version is 2"),
        ('{"schema": "lowlat.bench", "schema_version": 1, "what": "draft"}', "is of bench draft"),
        ('{"schema": "lowlat.bench", "schema_version": 1, "what": "layer", "figures": [{}]}',
         "a figure is broken"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused_before_anything_runs(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture, text: str, words: str
) -> None:
    old = tmp_path / "old.json"
    old.write_text(text)
    assert main(["bench", "layer", "--against", str(old)]) == 1
    captured = capsys.readouterr()
    assert words in captured.err and str(old) in captured.err and captured.err.count("\n") == 1
    assert not (programs.folder / "layer.words").exists()


@pytest.mark.parametrize("place", ["no/such/folder/a.json", "."])
def test_no_place_for_the_file_is_refused_before_anything_runs(
    programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture, place: str
) -> None:
    assert main(["bench", "layer", "--json", str(tmp_path / place)]) == 1
    assert "needed the path of a file" in capsys.readouterr().err
    assert not (programs.folder / "layer.words").exists()


def test_dispatch_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(engine, "run_words", lambda words: said.append(list(words)) or 0)
    words = ["bench", "dispatch", "--ranks", "2,4", "--help"]
    assert main(words) == 0
    assert said == [words]
