"""lowlat.cli.main: how any command ends."""

import argparse
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from lowlat.cli import main as entry
from lowlat.cli import op
from lowlat.cli.main import main
from lowlat.cli.outcome import FaultError, RefusedError, UsageError, one_line


def test_version(capsys: pytest.CaptureFixture) -> None:
    try:
        version = metadata.version("lowlat")
    except metadata.PackageNotFoundError:
        pytest.skip("lowlat is not installed (make build)")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lowlat {version}\n"


def test_help_names_every_command_and_status(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    words = capsys.readouterr().out
    for word in (
        "replay",
        "trace",
        "inspect",
        "op",
        "check",
        "doctor",
        "completion",
        "0 done",
        "1 refused",
        "2 wrong usage",
        "3 fault",
    ):
        assert word in words


@pytest.mark.parametrize("words", [[], ["bench"], ["--verbose"], ["op", "a", "b"]])
def test_wrong_usage_is_one_line_and_status_2(
    words: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "--help" in captured.err


@pytest.mark.parametrize("words", [[], ["doctor"], ["op", "--list"]])
def test_an_option_that_there_is_not_is_named_and_whose_help_lists_them(
    words: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main([*words, "--verbose"]) == 2
    helped = " ".join(["lowlat", *words[:1]])
    complaint = f"lowlat: unrecognized arguments: --verbose ({helped} --help)\n"
    assert capsys.readouterr().err == complaint


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RefusedError("no"), 1, "lowlat: no\n"),
        (UsageError("no"), 2, "lowlat: no\n"),
        (FaultError("no"), 3, "lowlat: no\n"),
        (KeyboardInterrupt(), 130, "lowlat: interrupted\n"),
        (MemoryError(), 3, "lowlat: out of memory\n"),
        (ZeroDivisionError("two\nlines"), 3, "lowlat: bug: ZeroDivisionError: two lines\n"),
        (
            OSError(2, "No such file", "a.json"),
            3,
            "lowlat: bug: FileNotFoundError: [Errno 2] No such file: 'a.json'\n",
        ),
    ],
)
def test_every_end_is_a_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    error: BaseException,
    status: int,
    words: str,
) -> None:
    def fail(arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(op, "run", fail)
    assert main(["op", "--list"]) == status
    assert capsys.readouterr().err == words


def test_a_reader_that_left_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: argparse.Namespace) -> int:
        raise BrokenPipeError

    redirected = []
    monkeypatch.setattr(op, "run", broken)
    monkeypatch.setattr(os, "dup2", lambda *handles: redirected.append(handles))
    assert main(["op", "--list"]) == 0
    assert len(redirected) == 1


@pytest.mark.parametrize(
    "words", [["op", "--list"], ["check", "--model", "tiny-v41"], ["--help"], ["bench", "--help"]]
)
@pytest.mark.parametrize("buffered", ["", "1"])
def test_output_that_is_lost_is_a_line_and_status_3(words: list[str], buffered: str) -> None:
    for part in ("lowlat._kernels", "lowlat._dispatch"):
        pytest.importorskip(part, reason=f"{part} is not built (make build)")
    environment = {**os.environ, "PYTHONUNBUFFERED": buffered}
    command = [sys.executable, "-m", "lowlat", *words]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=environment, timeout=60
        )
    assert ended.stderr == b"lowlat: standard output cannot be written: No space left on device\n"
    assert ended.returncode == 3


def test_words_of_an_error_without_words() -> None:
    assert one_line(ValueError()) == "ValueError"


@pytest.mark.parametrize("command", ["replay", "trace", "inspect"])
def test_the_engine_gets_every_word_unread(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    seen = []
    monkeypatch.setattr(entry.engine, "run_words", lambda words: seen.append(words) or 0)
    assert main([command, "--help", "--tp", "x", "op"]) == 0
    assert seen == [[command, "--help", "--tp", "x", "op"]]


@pytest.mark.parametrize("command", ["op", "check", "doctor", "completion"])
def test_the_help_of_a_command_is_whole_and_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    words = capsys.readouterr().out
    assert ended.value.code == 0 and f"lowlat {command}" in words
    assert "exit status:" in words and all(len(line) <= 100 for line in words.splitlines())
