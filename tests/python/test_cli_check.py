"""lowlat.cli.check: files, words and exit statuses, over a fake guard; test_dispatch.py asks the
real one."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lowlat.cli import check
from lowlat.cli.main import main


class FakeDispatch(SimpleNamespace):
    reasons: tuple[str, ...] = ()
    error: Exception | None = None
    asked: tuple[str, dict] | None = None
    planned: tuple[str, dict] | None = None
    plan_error: Exception | None = None

    def built_in(self, name: str) -> str | None:
        return '{"name": "tiny"}' if name == "tiny-v41" else None

    def built_in_names(self) -> list[str]:
        return ["tiny-v41"]

    def check(self, config: str, options: str) -> list[str]:
        self.asked = (config, json.loads(options))
        if self.error:
            raise self.error
        return list(self.reasons)

    def memory_plan(self, config: str, options: str) -> tuple[str, str]:
        self.planned = (config, json.loads(options))
        if self.plan_error:
            raise self.plan_error
        return '{"tp_size": 2}', "memory of a rank\n"


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> FakeDispatch:
    fake = FakeDispatch()
    monkeypatch.setitem(sys.modules, "lowlat._dispatch", fake)
    return fake


def test_servable(dispatch: FakeDispatch, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", "--model", "tiny-v41", "--tp", "2"]) == 0
    assert capsys.readouterr().out == (
        "tiny-v41 can be served: isa scalar, tp 2\nmemory of a rank\n"
    )
    assert dispatch.planned == ('{"name": "tiny"}', {"tp_size": 2})
    assert dispatch.asked == ('{"name": "tiny"}', {"isa": "scalar", "tp_size": 2})


def test_every_reason_is_numbered(dispatch: FakeDispatch, capsys: pytest.CaptureFixture) -> None:
    dispatch.reasons = ("tp is 3; needs 1, 2, 4", "page_size is 64; needs 256")
    assert main(["check", "--model", "tiny-v41", "--tp", "3", "--page-size", "64"]) == 1
    assert capsys.readouterr().out == (
        "tiny-v41 cannot be served so (2):\n"
        "  1. tp is 3; needs 1, 2, 4\n"
        "  2. page_size is 64; needs 256\n"
    )
    assert dispatch.asked[1]["page_size"] == 64


def test_json(dispatch: FakeDispatch, capsys: pytest.CaptureFixture) -> None:
    dispatch.reasons = ("no",)
    assert main(["check", "--model", "tiny-v41", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"servable": False, "reasons": ["no"], "memory": None, "checkpoint": None}
    assert dispatch.planned is None
    dispatch.reasons = ()
    assert main(["check", "--model", "tiny-v41", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    memory = {"tp_size": 2}
    assert answer == {"servable": True, "reasons": [], "memory": memory, "checkpoint": None}


def test_a_load_reaches_the_plan(dispatch: FakeDispatch) -> None:
    load = ["--page-size", "64", "--context", "4096", "--requests", "8"]
    assert main(["check", "--model", "tiny-v41", *load]) == 0
    options = {"tp_size": 1, "page_size": 64, "context": 4096, "requests": 8}
    assert dispatch.planned[1] == options


def test_a_load_that_cannot_be_planned_names_the_model(
    dispatch: FakeDispatch, capsys: pytest.CaptureFixture
) -> None:
    dispatch.plan_error = ValueError("context is 10; needs 1 to 9")
    assert main(["check", "--model", "tiny-v41", "--context", "10"]) == 1
    assert "tiny-v41: context is 10" in capsys.readouterr().err


@pytest.mark.parametrize("as_folder", [True, False])
def test_reads_a_folder_or_the_file(
    dispatch: FakeDispatch, tmp_path: Path, capsys: pytest.CaptureFixture, as_folder: bool
) -> None:
    (tmp_path / "config.json").write_text("\ufeff{}", encoding="utf-8")
    model = tmp_path if as_folder else tmp_path / "config.json"
    assert main(["check", "--model", str(model)]) == 0
    assert dispatch.asked[0] == "{}"
    words = ": no weights beside it" if as_folder else ""
    assert f"\nonly config.json was checked{words}\n" in capsys.readouterr().out


def folder_and_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A folder with weights, and an engine that answers with `script`."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    engine = tmp_path / "engine"
    engine.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    engine.chmod(0o755)
    monkeypatch.setattr(check.engine, "installed_file", lambda *_: engine)
    return folder


def test_headers_of_a_folder_are_checked(
    dispatch: FakeDispatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    folder = folder_and_engine(tmp_path, monkeypatch, 'echo "$@ 2 files"')
    assert main(["check", "--model", str(folder)]) == 0
    assert capsys.readouterr().out == (
        f"{folder} can be served: isa scalar, tp 1\n"
        f"checked: config.json, and every header: check-checkpoint -- {folder} 2 files\n"
        "memory of a rank\n"
    )


def test_a_header_that_is_wrong_is_a_reason(
    dispatch: FakeDispatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    refuses = 'echo "lowlat check-checkpoint: refused: x: norm.weight: is F32" >&2; exit 1'
    folder = folder_and_engine(tmp_path, monkeypatch, refuses)
    assert main(["check", "--model", str(folder)]) == 1
    assert capsys.readouterr().out == (
        f"{folder} cannot be served so (1):\n  1. x: norm.weight: is F32\n"
    )
    assert dispatch.planned is None
    # What the guard refuses already is not looked into.
    dispatch.reasons = ("tp is 3",)
    assert main(["check", "--model", str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["reasons"] == ["tp is 3"]


@pytest.mark.parametrize(
    ("script", "words"), [("echo broken >&2; exit 3", "broken"), ("sleep 9", "does not answer")]
)
def test_an_engine_that_fails_is_a_fault(
    dispatch: FakeDispatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    script: str,
    words: str,
) -> None:
    folder = folder_and_engine(tmp_path, monkeypatch, script)
    monkeypatch.setattr(check, "BUDGET_S", 0.5)
    assert main(["check", "--model", str(folder)]) == 3
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "neither a built-in model (tiny-v41) nor a folder"), (b"\xff\xfe\x00", "not UTF-8")],
)
def test_a_config_that_cannot_be_read(
    dispatch: FakeDispatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    content: bytes | None,
    words: str,
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert main(["check", "--model", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1


def test_what_the_guard_cannot_read_names_the_model(
    dispatch: FakeDispatch, capsys: pytest.CaptureFixture
) -> None:
    dispatch.error = ValueError("hidden_size is missing")
    assert main(["check", "--model", "tiny-v41"]) == 1
    assert "tiny-v41: hidden_size is missing" in capsys.readouterr().err


def test_a_pipe_is_not_waited_for(
    dispatch: FakeDispatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert main(["check", "--model", str(tmp_path)]) == 1
    assert "config.json: not a regular file" in capsys.readouterr().err


def test_a_name_that_is_too_long(dispatch: FakeDispatch, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", "--model", "x" * 300]) == 1
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tp", "--page-size", "--context", "--requests"])
@pytest.mark.parametrize("value", ["0", "-1", "", "1.5", "2147483648", "\u0661", "9" * 5000])
def test_a_count_that_is_none(
    dispatch: FakeDispatch, capsys: pytest.CaptureFixture, option: str, value: str
) -> None:
    assert main(["check", "--model", "tiny-v41", f"{option}={value}"]) == 2
    assert "no whole number from 1 to 2147483647" in capsys.readouterr().err
    assert dispatch.asked is None


@pytest.mark.parametrize(
    "words",
    [
        ["check"],
        ["check", "--model", "tiny-v41", "--tp", "two"],
        ["check", "--model", "tiny-v41", "--requests", "2"],
        ["check", "--model", "tiny-v41", "--tp", "2", "--tp", "2"],
        ["check", "--model", "tiny-v41", "--model=tiny-v4"],
        ["op", "rms_norm", "--in", "a", "--in", "b", "--out", "c"],
    ],
)
def test_wrong_usage(
    dispatch: FakeDispatch, capsys: pytest.CaptureFixture, words: list[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert dispatch.asked is None


def test_an_option_given_twice_is_named(
    dispatch: FakeDispatch, capsys: pytest.CaptureFixture
) -> None:
    assert main(["check", "--model", "tiny-v41", "--tp", "2", "--tp", "4"]) == 2
    assert "--tp is given twice; one is needed" in capsys.readouterr().err
