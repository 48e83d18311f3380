"""lowlat.cli.completion: the scripts, run by the shells themselves."""

import shutil
import subprocess
from pathlib import Path

import pytest
from lowlat.cli import completion, engine, parts
from lowlat.cli.main import build_parser, main
from lowlat.cli.outcome import FaultError

BUDGET_S = 60

# Fills what bash gives a completion function, calls the one that the script registered, and prints
# its answers. compopt works in an interactive completion only.
BASH = """
compopt() { :; }
source "$1"; shift
registered=$(complete -p lowlat)
function=${registered#*-F }; function=${function%% *}
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
"$function" lowlat "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(capsys: pytest.CaptureFixture, shell: str) -> str:
    try:
        parts.installed_file(*engine.BINARY)
    except FaultError:
        pytest.skip("lowlat is not installed (make build)")
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def bash(capsys: pytest.CaptureFixture, tmp_path: Path) -> Path:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    path = tmp_path / "lowlat.bash"
    path.write_text(script(capsys, "bash"))
    return path


def completed(path: Path, *words: str) -> set[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", str(path), "lowlat", *words],
        capture_output=True,
        text=True,
        timeout=BUDGET_S,
        check=True,
        cwd=path.parent,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_options_values_and_files(bash: Path) -> None:
    commands = completed(bash, "")
    assert {"replay", "trace", "inspect", "op", "check", "doctor", "completion"} <= commands
    assert completed(bash, "re") == {"replay"}
    assert {"info", "synth"} <= completed(bash, "trace", "")
    assert completed(bash, "trace", "synth", "--pre") == {"--prefix-sharing"}
    assert completed(bash, "replay", "--speculative", "o") == {"on", "off"}
    assert completed(bash, "doctor", "--") >= {"--json", "--help"}
    assert "--platform" in completed(bash, "op", "--pl")
    assert {"bash", "zsh", "fish"} <= completed(bash, "completion", "")
    (bash.parent / "some-trace.json").write_text("{}")
    assert completed(bash, "op", "--in", "some-") == {"some-trace.json"}
    assert completed(bash, "replay", "--record", "some-") == {"some-trace.json"}


@pytest.mark.parametrize(("shell", "words"), [("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_other_shells_can_read_theirs(
    capsys: pytest.CaptureFixture, tmp_path: Path, shell: str, words: list[str]
) -> None:
    text = script(capsys, shell)
    for word in ("prefix-sharing", "simulate-acceptance", "doctor"):
        assert word in text
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} to read it")
    path = tmp_path / "script"
    path.write_text(text)
    subprocess.run([shell, *words, str(path)], timeout=BUDGET_S, check=True)


def test_every_command_of_python_is_described() -> None:
    described = completion.describe(build_parser())
    by_name = {command["name"]: command for command in described}
    assert set(by_name) == {"op", "check", "doctor", "bench", "profile", "completion"}
    options = {option["name"]: option for option in by_name["op"]["options"]}
    assert options["in"]["kind"] == options["out"]["kind"] == "file"
    assert options["list"]["kind"] == "flag" and options["name"]["kind"] == "positional"
    assert "default scalar" in options["platform"]["about"]
    (shell,) = by_name["completion"]["options"]
    assert shell["choices"] == ["bash", "zsh", "fish"]


def test_an_engine_that_fails_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\ncat > /dev/null\necho no >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(engine, "installed_file", lambda *words: program)
    assert main(["completion", "bash"]) == 3
    assert capsys.readouterr().err == "lowlat: no\n"
    assert main(["completion", "tcsh"]) == 2
