"""lowlat.cli.engine: the hand-over to the engine's binary."""

import os
from pathlib import Path

import pytest
from lowlat.cli import engine
from lowlat.cli.main import main
from lowlat.cli.outcome import FaultError


@pytest.fixture
def binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "lowlat-engine"
    monkeypatch.setattr(engine, "installed_file", lambda *parts: path)
    return path


def test_becomes_the_binary_with_the_same_words(
    binary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append((path, words)))
    engine.run_words(["replay", "a.json", "--tp", "2"])
    assert became == [(binary, [str(binary), "replay", "a.json", "--tp", "2"])]
    became.clear()
    main(["make-checkpoint", "tiny-v41", "out"])
    assert became == [(binary, [str(binary), "make-checkpoint", "tiny-v41", "out"])]


def test_a_binary_that_does_not_start_is_a_fault(binary: Path) -> None:
    binary.write_text("no program")
    with pytest.raises(FaultError, match="does not start"):
        engine.run_words(["replay"])


def test_a_missing_binary_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(engine, "BINARY", ("_bin", "no-such-program"))
    assert main(["replay"]) == 3
    assert "_bin/no-such-program is missing" in capsys.readouterr().err
