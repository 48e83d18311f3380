"""The engine's commands: hands over to its binary. No Python runs after that."""

import argparse
import os
import subprocess
from collections.abc import Sequence

from lowlat.cli.outcome import FaultError, one_line
from lowlat.cli.parts import installed_file

BINARY = ("_bin", "lowlat-engine")

# Command: what `lowlat --help` says of it. Options are the engine's, --help included.
COMMANDS = {
    "replay": "replay agent traces through the engine, with a report (lowlat replay --help)",
    "trace": "look into traces, or make some (lowlat trace info, lowlat trace synth)",
    "inspect": "show the graph record of a replay, or what two differ in",
    "make-checkpoint": "write a built-in model as a checkpoint folder",
}
# The same of what a command of ours hands on whole.
PARTS = (("bench", "dispatch"),)


def is_engines(words: Sequence[str]) -> bool:
    """Whether the engine's binary runs these words."""
    return bool(words) and (words[0] in COMMANDS or tuple(words[:2]) in PARTS)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Lists the commands in `lowlat --help`."""
    for name, words in COMMANDS.items():
        commands.add_parser(name, help=words, add_help=False)


def run_words(words: Sequence[str]) -> int:
    """Replaces this process by ``lowlat-engine`` with the same words, the command's name first."""
    binary = installed_file(*BINARY)
    try:
        os.execv(binary, [str(binary), *words])
    except OSError as error:
        raise FaultError(f"{binary} does not start: {one_line(error)}") from error


def ask(
    words: Sequence[str], budget_s: float, told: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """What ``lowlat-engine`` answers to these words, and to `told` on its standard input. Raises
    FaultError when it is not there or takes longer."""
    binary = installed_file(*BINARY)
    try:
        return subprocess.run(
            [binary, *words],
            input=told,
            capture_output=True,
            text=True,
            timeout=budget_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FaultError(f"{binary} does not answer: {one_line(error)}") from error
