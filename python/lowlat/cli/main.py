"""Entry point of the command ``lowlat``."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lowlat.cli import bench, check, completion, doctor, engine, op, profile
from lowlat.cli.outcome import DONE, FAULT, CommandError, UsageError, one_line
from lowlat.cli.parts import version

EPILOG = """\
exit status: 0 done; 1 refused, or a check that failed; 2 wrong usage; 3 fault

examples:
  lowlat doctor
  lowlat replay trace.json --model tiny-v41 --tp 2 --report out/
  lowlat trace synth --out traces --sessions 4 --seed 1
  lowlat trace info traces/*.json
  lowlat op --list
  lowlat op rms_norm --in case.npz --out out.npz --platform scalar
  lowlat bench layer --rows 6,12 --json layer.json
  lowlat profile layer --out profile/
  lowlat check --model v4-flash --tp 4
  lowlat make-checkpoint tiny-v4 ./tiny
  source <(lowlat completion bash)
"""


class Once(argparse.Action):
    """Keeps an option's value, and refuses a second one instead of forgetting the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if option_string is not None:
            given = namespace.__dict__.setdefault("_given", set())
            if self.dest in given:
                parser.error(f"{option_string} is given twice; one is needed")
            given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, and whose options are given once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for action in (None, "store"):
            self.register("action", action, Once)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """A command complains of what it does not know, so that its own --help is named."""
        known, rest = super().parse_known_args(*args, **kwargs)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return known, rest

    def _print_message(self, message: str, file: Any = None) -> None:
        """Not argparse's own, which keeps silent about an output that cannot be written."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help)")


class VersionAction(argparse.Action):
    """Prints the version when asked, and looks it up only then."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        print(f"lowlat {version()}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="lowlat",
        description="Low-latency decode for mixture-of-experts models: replay agent traces, run one"
        "\noperation, check what can be served and what this machine can do.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=VersionAction, nargs=0, help="print the version")
    # Not required=True: that complains of a missing command before an option that there is not.
    parser.set_defaults(run=lambda _: parser.error("needed a COMMAND"))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in (engine, op, bench, profile, check, doctor, completion):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; every failure is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if engine.is_engines(words):
            # Their options are the engine's own, --help included, so argparse never sees them.
            return engine.run_words(words)
        try:
            arguments = build_parser().parse_args(words)
        except SystemExit:  # --help and --version have printed
            sys.stdout.flush()
            raise
        status = arguments.run(arguments)
        # Here, where a failure is still a line and a status.
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"lowlat: {one_line(error)}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        # The reader left (`lowlat op --list | head`) with what it wanted.
        drop_stdout()
        return DONE
    except KeyboardInterrupt:
        print("lowlat: interrupted", file=sys.stderr)
        return 130
    except MemoryError:
        print("lowlat: out of memory", file=sys.stderr)
        return FAULT
    except OSError as error:
        # The commands refuse their files by name; what has no name is standard output.
        if error.filename is not None:
            return bug(error)
        drop_stdout()
        words = f"standard output cannot be written: {error.strerror or one_line(error)}"
        print(f"lowlat: {words}", file=sys.stderr)
        return FAULT
    except Exception as error:  # the last border: a user gets a line, never a traceback
        return bug(error)


def bug(error: Exception) -> int:
    print(f"lowlat: bug: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
    return FAULT


def drop_stdout() -> None:
    """The interpreter flushes stdout once more as it ends: that goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
