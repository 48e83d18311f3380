"""``lowlat replay`` and ``lowlat make-checkpoint``: hand over to the engine's own binary. No
Python runs after that."""

import argparse
import os
from collections.abc import Sequence

from lowlat.cli.outcome import FaultError, one_line
from lowlat.cli.parts import installed_file

NAME = "replay"
MAKE_CHECKPOINT = "make-checkpoint"
BINARY = ("_bin", "lowlat-replay")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Lists the commands in `lowlat --help`; their options are the engine's."""
    commands.add_parser(
        NAME, help="replay agent traces through the engine (lowlat replay --help)", add_help=False
    )
    commands.add_parser(
        MAKE_CHECKPOINT,
        help="write a built-in model as a checkpoint folder (lowlat make-checkpoint --help)",
        add_help=False,
    )


def run_words(words: Sequence[str]) -> int:
    """Replaces this process by ``lowlat-replay`` with the same words."""
    binary = installed_file(*BINARY)
    try:
        os.execv(binary, [str(binary), *words])
    except OSError as error:
        raise FaultError(f"{binary} does not start: {one_line(error)}") from error
