"""The command `lowlat replay` as it is installed, on real kernels: the demo and recorded traces."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = "examples/traces/small.json"
TRACES = Path(os.environ.get("LOWLAT_TRACES", ROOT.parent / "shared" / "data" / "traces"))
BUDGET_S = 600


def replay(*words: str) -> subprocess.CompletedProcess:
    # Beside the interpreter, so that it is the installed one and not another on the path.
    command = Path(sys.executable).with_name("lowlat")
    return subprocess.run(
        [command, "replay", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BUDGET_S,
        check=False,
    )


def requests_of(trace: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of every request of the file, subagents' where they stand."""

    def walk(entries: list[dict]) -> list[tuple[int, int]]:
        found = []
        for entry in entries:
            if "requests" in entry:
                found += walk(entry["requests"])
            else:
                found.append((entry["in"], entry["out"]))
        return found

    return walk(json.loads(trace.read_text())["requests"])


def check_counts(report: dict, traces: list[Path], most_in: int, most_out: int) -> None:
    """What the report counts is what the files hold, after the caps."""
    wanted = [request for trace in traces for request in requests_of(trace)]
    for measured, (tokens_in, tokens_out) in zip(report["requests"], wanted, strict=True):
        assert measured["input_tokens"] == min(tokens_in, most_in), measured["path"]
        assert measured["output_tokens"] == min(tokens_out, most_out), measured["path"]
    totals = report["totals"]
    assert totals["requests"] == len(wanted)
    assert totals["trace_input_tokens"] == sum(tokens_in for tokens_in, _ in wanted)
    assert totals["trace_output_tokens"] == sum(tokens_out for _, tokens_out in wanted)


def without_times(text: str) -> list[str]:
    """The lines that do not depend on the machine: no figure of a time, no rule of a table."""
    lines = [line.strip("│ ") for line in text.splitlines() if not re.match("[┌╞└]", line)]
    kept = ("prefix cache", "per request", "user rate", "end to end", "time to first", "between")
    words = [line for line in lines if line.startswith(kept)]
    heads = [re.sub(r"in [0-9.]+ s$", "in # s", line) for line in lines[:2]]
    return heads + [re.sub(r"(?<= )[0-9.]+(?= |$)", "#", line) for line in words]


def test_the_demo_ends_as_the_readme_shows(tmp_path: Path) -> None:
    done = replay(DEMO, "--model", "tiny-v41", "--tp", "2", "--report", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    check_counts(report, [ROOT / DEMO], most_in=1 << 31, most_out=1 << 31)
    assert report["steps"]["draft"]["covered"] == report["steps"]["verify"]["steps"]
    readme = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"ends with\n\n```\n(.*?)```", readme, re.DOTALL)
    assert [" ".join(line.split()) for line in without_times(shown)] == [
        " ".join(line.split()) for line in without_times(done.stdout)
    ]


def test_recorded_traces_replay_on_two_ranks(tmp_path: Path) -> None:
    traces = sorted(TRACES.glob("*.json"))
    if not traces:
        pytest.skip(f"no recorded traces in {TRACES} (LOWLAT_TRACES)")
    words = ["--tp", "2", "--sessions", "8", "--limit-input", "96", "--limit-output", "6"]
    done = replay(*map(str, traces), *words, "--report", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    check_counts(report, traces, most_in=96, most_out=6)


def test_a_rank_with_other_widths_ends_the_command_with_its_difference(tmp_path: Path) -> None:
    words = ["--tp", "2", "--inject-fault", "1:widths", "--report", str(tmp_path / "out")]
    done = replay(DEMO, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert re.search(r"rank 1 covers widths \[.*\]; rank 0 covers \[", done.stderr), done.stderr
    assert not (tmp_path / "out").exists()
