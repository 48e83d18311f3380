"""``lowlat profile``: when each stage of each block waited and when it computed."""

import argparse
import json
import tempfile
from pathlib import Path

from lowlat.cli import bench, files, measure, stamps
from lowlat.cli.outcome import DONE, EXIT_STATUSES, FaultError, RefusedError, UsageError

NAME = "profile"
WHATS = ("layer",)

DESCRIPTION = """\
Runs a layer's kernels with clock stamps inside, on this machine's GPU, and shows for every stage of
every block when it waited and when it computed. Into the folder of --out go

  layer.svg             a picture: a lane a kernel, a line a block, waits grey
  layer.perfetto.json   the same for https://ui.perfetto.dev and chrome://tracing
  layer.stamps.json     the stamps themselves; --from draws from such a file, on any machine

The stamps' own cost is part of it: the time of a layer with them and without, from the same run.
"""

EPILOG = f"""\
examples:
  lowlat profile layer --rows 6 --out profile/
  lowlat profile layer --from profile/layer.stamps.json --out elsewhere/

{EXIT_STATUSES}"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        NAME,
        help="draw when each stage of a layer waited and computed, block by block",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=WHATS, metavar="WHAT", help="what to profile: layer")
    bench.add_step_options(
        parser, rows="token rows of the step; default 6", tp="ranks, 2 or 4; default 4"
    )
    # Stamps are taken of this layer alone, of one rank's share.
    parser.set_defaults(model="v41", gpus=1, schedule="fused")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="folder of the files; made if new"
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="draw from these stamps"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    bench.check_case(arguments)
    if len(arguments.rows) != 1:
        raise UsageError("profile takes one row count")
    if arguments.source is not None:
        profile = stamps.read(arguments.source)
        text = None
    else:
        profile, text = recorded(arguments)
    folder = arguments.out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RefusedError(f"{folder}: no folder for the files: {error.strerror}") from error
    what = arguments.what
    written = {f"{what}.svg": stamps.picture(profile)}
    written[f"{what}.perfetto.json"] = json.dumps(stamps.trace(profile))
    if text is not None:
        written[f"{what}.stamps.json"] = text
    for name in written:
        files.check_output(folder / name, arguments.source)
    # Before anything is printed: a reader that leaves (`| head`) takes no file with it.
    for name, content in written.items():
        files.write_text(folder / name, content)
    for line in stamps.table(profile):
        print(line)
    for name in written:
        print(f"wrote {folder / name}")
    return DONE


def recorded(arguments: argparse.Namespace) -> tuple[stamps.Profile, str]:
    """Times the layer, then runs its build with stamps; the profile and the file's text."""
    what = arguments.what
    plain = measured(what, bench.program_words(arguments))
    plain_us = next((f["median"] for f in plain.figures if f["name"] == what), None)
    if plain_us is None:
        raise FaultError(f"bench {what} gave no figure of that name; install lowlat again")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stamps.json")
        words = [*bench.program_words(arguments), "--stamps", str(path)]
        measured(f"{what}_stamps", [*words, "--plain-us", str(plain_us)])
        return stamps.read(path), path.read_text(encoding="utf-8")


def measured(program: str, words: list[str]) -> measure.Answer:
    answer = measure.measured(NAME, program, words)
    if answer.failed_checks:
        names = ", ".join(check["name"] for check in answer.failed_checks)
        raise RefusedError(f"wrong results: {names}; no profile is drawn of them")
    return answer
