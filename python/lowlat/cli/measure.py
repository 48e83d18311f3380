"""Runs the measuring programs of ``lowlat bench`` and ``lowlat profile`` and reads what they say.

They are programs of the kernels' build (``lowlat/_bench``), which print a JSON object a line; see
bench/report.hpp. This side parses and never times anything.
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowlat.cli.outcome import FaultError, RefusedError, one_line
from lowlat.cli.parts import installed_file

ROOM = "_bench"
# Most rows that a fused kernel is built for.
MAX_ROWS = 48
# A program makes a layer's random weights, checks, and replays graphs of a millisecond.
BUDGET_S = 300.0
# Of the words of a program that failed.
MOST_WORDS = 400


@dataclass
class Answer:
    """What a program said, by kind of line."""

    machine: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    # Lines for people.
    words: list[str] = field(default_factory=list)
    refusal: str = ""

    @property
    def failed_checks(self) -> list[dict[str, Any]]:
        return [check for check in self.checks if not check["good"]]


NUMBER = (int, float)
# The fields that this side reads, by kind of line.
FIELDS: dict[str, dict[str, Any]] = {
    "machine": {"gpu": str, "gpus": int, "clock_mhz": NUMBER, "read_bytes_per_s": NUMBER},
    "check": {"name": str, "good": bool, "words": str},
    "figure": {
        **dict.fromkeys(("arm", "name", "model", "unit"), str),
        **dict.fromkeys(("tp", "gpus", "rows", "repeats"), int),
        **dict.fromkeys(("median", "low", "high"), NUMBER),
    },
    "refusal": {"words": str},
}


def parse(text: str, source: str) -> Answer:
    """The lines of a program; FaultError names the first that is not as agreed."""
    answer = Answer()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("{"):
            answer.words.append(line)
            continue
        try:
            said = json.loads(line)
        except ValueError as error:
            raise FaultError(f"{source}, line {number}: no JSON ({one_line(error)})") from error
        kind = said.get("kind")
        if kind not in FIELDS:
            raise FaultError(
                f"{source}, line {number}: kind is {kind!r}; needed {', '.join(FIELDS)}"
            )
        for name, types in FIELDS[kind].items():
            if not isinstance(said.get(name), types):
                words = f"{kind} has {name} {said.get(name)!r}"
                raise FaultError(f"{source}, line {number}: {words}; needed a value of its type")
        if kind == "machine":
            answer.machine = said
        elif kind == "check":
            answer.checks.append(said)
        elif kind == "figure":
            answer.figures.append(said)
        else:
            answer.refusal = said["words"]
    return answer


def what_of(program: str) -> str:
    """What a program measures, as the command names it: the layer, of layer_v4."""
    return program.partition("_")[0]


def program(name: str, source: str) -> Path:
    """The measuring program of that name; refused in builds without CUDA."""
    try:
        return installed_file(ROOM, name)
    except FaultError:
        raise RefusedError(
            f"{source} needs kernels for NVIDIA GPUs, and this lowlat was built without; build it"
            " where nvcc is (LOWLAT_PIP_CUDA=1 pip install . fetches one) for a machine with a GPU"
            " of sm_90 (AMD GPUs are timed by test_host_amd_gpu alone, see docs/amd.md)"
        ) from None


def run(words: Sequence[str], source: str, budget_s: float = BUDGET_S) -> tuple[int, Answer]:
    """Exit status and answer of a program that ended by itself within the budget."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=budget_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise FaultError(f"{source} did not end within {budget_s:g} s and was stopped") from None
    except OSError as error:
        raise FaultError(f"{source} does not start: {one_line(error)}") from error
    if done.returncode not in (0, 1):
        tail = one_line((done.stderr.strip() or done.stdout.strip() or "no words")[-MOST_WORDS:])
        ended = f"status {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        raise FaultError(f"{source} ended with {ended}: {tail}")
    answer = parse(done.stdout, source)
    if done.returncode == 1 and not answer.refusal and not answer.failed_checks:
        tail = one_line((done.stderr.strip() or " ".join(answer.words) or "no words")[-MOST_WORDS:])
        answer.refusal = tail
    return done.returncode, answer


def measured(command: str, name: str, words: Sequence[str]) -> Answer:
    """What the program `name` measured for a command of lowlat; refused where it says that it
    cannot."""
    source = f"{command} {what_of(name)}"
    status, answer = run([str(program(name, source)), *words], source)
    if answer.refusal:
        raise RefusedError(f"{source}: {answer.refusal}")
    if status == 0 and not answer.machine:
        raise FaultError(f"{source} named no machine; install lowlat again")
    return answer
