"""lowlat.cli.profile: the files that it writes, from a program's stamps or from recorded ones."""

import json
import sys
from pathlib import Path

import pytest
from lowlat.cli import measure
from lowlat.cli.main import main
from lowlat.cli.outcome import FaultError

STAMPS = {
    **{"schema": "lowlat.stamps", "schema_version": 1, "what": "layer", "model": "v41"},
    **{"schedule": "fused", "tp": 4, "gpus": 1, "rows": 6, "units": 1},
    **{"machine": {"gpu": "NVIDIA H200"}, "plain_us": 50.0, "stamped_us": 51.0},
    "launches": ["front"],
    "stages": [{"name": "x", "waits": True}, {"name": "products", "waits": False}],
    "stamps": [[0, 0, 0, 0, 500], [0, 1, 0, 500, 2500]],
}
MACHINE = {
    **{"kind": "machine", "gpu": "NVIDIA H200", "gpus": 1, "clock_mhz": 1980},
    "read_bytes_per_s": 4.5e12,
}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(STAMPS))
    return path


FIGURE = {
    **{"kind": "figure", "arm": "lowlat", "name": "layer", "model": "v41", "schedule": "fused"},
    **{"tp": 4, "gpus": 1, "rows": 6, "unit": "us", "repeats": 60},
    **{"median": 50.0, "low": 49.5, "high": 50.5},
}


def fake_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[dict]) -> Path:
    """Programs that print the lines, write their words beside themselves, and the stamps where
    --stamps says."""
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("layer", "layer_stamps"):
        path = folder / name
        path.write_text(
            f"#!{sys.executable}\n"
            "import pathlib, sys\n"
            f"words = sys.argv[1:]\n"
            f"pathlib.Path({str(folder / (name + '.words'))!r}).write_text(' '.join(words))\n"
            "if '--stamps' in words:\n"
            "    path = pathlib.Path(words[words.index('--stamps') + 1])\n"
            f"    path.write_text({json.dumps(STAMPS)!r})\n"
            f"print({text!r})\n"
        )
        path.chmod(0o755)
    monkeypatch.setattr(measure, "installed_file", lambda *parts: folder / parts[-1])
    return folder


def test_draws_recorded_stamps_without_a_gpu(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["profile", "layer", "--from", str(recorded), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"layer.svg", "layer.perfetto.json"}
    said = capsys.readouterr().out
    assert "stamps cost +2.0 %" in said and f"wrote {out / 'layer.svg'}" in said
    assert (out / "layer.svg").read_text().startswith("<svg ")
    trace = json.loads((out / "layer.perfetto.json").read_text())
    assert [e["dur"] for e in trace["traceEvents"] if e["ph"] == "X"] == [0.5, 2.0]


def test_runs_the_program_with_stamps_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_programs(tmp_path, monkeypatch, [MACHINE, FIGURE])
    out = tmp_path / "out"
    assert main(["profile", "layer", "--rows", "12", "--out", str(out)]) == 0
    words = "--model v41 --tp 4 --gpus 1 --rows 12 --schedule fused --repeats 60"
    assert (folder / "layer.words").read_text() == words
    stamped = (folder / "layer_stamps.words").read_text().split(" ")
    assert stamped[: stamped.index("--stamps")] == words.split(" ")
    assert stamped[-2:] == ["--plain-us", "50.0"]
    assert json.loads((out / "layer.stamps.json").read_text()) == STAMPS
    again = tmp_path / "again"
    source = str(out / "layer.stamps.json")
    assert main(["profile", "layer", "--from", source, "--out", str(again)]) == 0
    for name in ("layer.svg", "layer.perfetto.json"):
        assert (again / name).read_bytes() == (out / name).read_bytes()


def test_wrong_results_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    wrong = {"kind": "check", "name": "residual", "good": False, "words": ""}
    fake_programs(tmp_path, monkeypatch, [MACHINE, FIGURE, wrong])
    assert main(["profile", "layer", "--out", str(tmp_path / "out")]) == 1
    assert "wrong results: residual" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_source_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "layer.svg"
    source.write_text(json.dumps(STAMPS))
    assert main(["profile", "layer", "--from", str(source), "--out", str(tmp_path)]) == 1
    assert "is the input too" in capsys.readouterr().err
    assert json.loads(source.read_text()) == STAMPS


def test_a_build_without_cuda_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def missing(*parts: str) -> Path:
        raise FaultError(f"{parts} is missing")

    monkeypatch.setattr(measure, "installed_file", missing)
    assert main(["profile", "layer", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("lowlat: profile layer needs kernels for NVIDIA GPUs")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["profile", "layer"], 2),
        (["profile", "exchange", "--out", "x"], 2),
        (["profile", "layer", "--rows", "1,6", "--out", "x"], 2),
        (["profile", "layer", "--gpus", "2", "--out", "x"], 2),
        (["profile", "layer", "--model", "v4", "--out", "x"], 2),
        (["profile", "layer", "--schedule", "persistent", "--out", "x"], 2),
        (["profile", "layer", "--from", "none.json", "--out", "x"], 1),
    ],
)
def test_refusals_are_one_line(
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    status: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == status
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be(recorded: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["profile", "layer", "--from", str(recorded), "--out", str(recorded)]) == 1
    assert "no folder for the files" in capsys.readouterr().err
