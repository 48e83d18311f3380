"""``lowlat bench``: times of the kernels against their floor, a baseline and an earlier run."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowlat.cli import files, measure
from lowlat.cli.outcome import DONE, REFUSED, FaultError, RefusedError, UsageError, one_line
from lowlat.cli.parts import installed_file, version

NAME = "bench"
WHATS = ("layer", "exchange", "draft")
# What `lowlat bench` hands to the engine's binary, whole.
ENGINE_WHATS = ("dispatch",)

SCHEMA = "lowlat.bench"
SCHEMA_VERSION = 1
# What names a figure in every run.
KEY = ("name", "model", "schedule", "tp", "gpus", "rows")
# Two runs of one build on one machine differed by less.
LEAST_NOISE = 0.02

DESCRIPTION = """\
Times kernels on this machine's GPUs, in CUDA graphs with inputs rotated past the caches, and
checks their results first. Each figure comes with its median and spread (10th and 90th of 100
replays), the bytes that the work must move, the floor: those bytes over the read rate that was
measured in this run, and the share of it. Beside it, in the same run, the same work as one kernel
an operation by torch, cuBLAS, Triton and NCCL, where a Python with torch is named or at hand.

  layer      one plain decoder layer of a rank: attention half and mixture of experts; of v4 one
             layer of each kind, 8K positions of context
  exchange   a product's partial sums, published, summed over ranks, mixed and normed
  draft      the five proposals of the draft
  dispatch   the dispatcher's decision and vote, on the CPU (lowlat bench dispatch --help)
"""

EPILOG = """\
examples:
  lowlat bench layer --rows 1,6,12,24,48 --json layer.json
  lowlat bench draft --tp 2 --gpus 2 --python ~/sglang/bin/python
  lowlat bench exchange --rows 12,24,48
  lowlat bench layer --against layer.json
  lowlat bench layer --model v4
  lowlat bench layer --platform scalar --tp 2

exit status:
  0  done
  1  refused (no GPU, no kernels for it), a result that was wrong, or slower than --against by more
     than the noise; the file of --json is written in this last case only
  2  the command line is wrong
  3  fault: a program hung or crashed, or a part of the installation is missing
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        NAME,
        help="time layers, exchanges, drafts or the dispatcher against floor and baseline",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "what", choices=(*WHATS, *ENGINE_WHATS), metavar="WHAT", help="what to time (see above)"
    )
    add_case_options(parser)
    parser.add_argument(
        "--platform",
        choices=("nvidia", "scalar"),
        default="nvidia",
        help="scalar: a tiny layer on the CPU, beside one stage after another; default %(default)s",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="an earlier run's --json file to compare with"
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        default=sys.executable,
        help="interpreter with torch and Triton for the baseline arm; default this one",
    )
    parser.add_argument("--no-baseline", action="store_true", help="no baseline arm")
    parser.set_defaults(run=run)


def add_case_options(parser: argparse.ArgumentParser) -> None:
    """What is timed."""
    parser.add_argument(
        "--model",
        choices=("v41", "v4"),
        default="v41",
        help="whose shape, v4 of layer alone and on one GPU; default %(default)s",
    )
    add_step_options(
        parser,
        rows="token rows of a step, a draft's too: six a request; default 6, of exchange 12",
        tp="ranks, 2 or 4; default 4, of exchange 2; of a layer on scalar 1, 2 or 4, default 1",
    )
    parser.add_argument(
        "--gpus",
        type=power_of_two,
        metavar="N",
        help="1: one rank's share, its exchange looped back; or as many as ranks; default 1, of"
        " exchange 2",
    )
    parser.add_argument(
        "--schedule",
        choices=("fused", "persistent"),
        help="fused: kernels that overlap; persistent: one kernel a step, of v41's layer; default"
        " fused, on scalar persistent",
    )


def add_step_options(parser: argparse.ArgumentParser, rows: str, tp: str) -> None:
    """The step that is timed; `rows` and `tp` are the options' help. `lowlat profile` has them."""
    parser.add_argument("--rows", type=row_counts, metavar="T,T", help=rows)
    parser.add_argument("--tp", type=power_of_two, metavar="N", help=tp)
    parser.add_argument(
        "--repeats", type=repeats, default=60, metavar="N", help="replays; default %(default)s"
    )


def row_counts(text: str) -> list[int]:
    most = measure.MAX_ROWS
    numbers = [whole(word, most) for word in text.split(",")]
    if None in numbers or len(set(numbers)) != len(numbers):
        words = f"{text!r} is no list of different whole numbers from 1 to {most}, as 6,12"
        raise argparse.ArgumentTypeError(words)
    return [number for number in numbers if number is not None]


def power_of_two(text: str) -> int:
    number = whole(text, 8)
    if number not in (1, 2, 4, 8):
        raise argparse.ArgumentTypeError(f"{text!r} is none of 1, 2, 4, 8")
    return number


def repeats(text: str) -> int:
    number = whole(text, 10_000)
    if number is None or number < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 10 to 10000")
    return number


def whole(text: str, most: int) -> int | None:
    """The number that the text is, from 1 on; None where it is no such number."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        return None
    number = int(text)
    return number if 1 <= number <= most else None


def run(arguments: argparse.Namespace) -> int:
    check_case(arguments, arguments.platform)
    what = arguments.what
    earlier = None
    if arguments.against is not None:
        earlier = read_earlier(arguments.against, what)
    if arguments.json is not None:
        files.check_output(arguments.json, arguments.against)
    answer = measure.measured(NAME, program_of(arguments), program_words(arguments))
    print(machine_words(answer.machine))
    for check in answer.checks:
        state = "ok  " if check["good"] else "WRONG"
        print(f"{state} {' '.join(filter(None, (check['name'], check['words'])))}")
    if answer.failed_checks:
        raise RefusedError(
            f"{len(answer.failed_checks)} of {len(answer.checks)} results are wrong; no time counts"
        )
    if earlier is not None and earlier["machine"]["gpu"] != answer.machine["gpu"]:
        seen, here = earlier["machine"]["gpu"], answer.machine["gpu"]
        raise RefusedError(f"{arguments.against}: is of {seen}, and this is {here}")
    # A program may bring its own baseline.
    baseline, why = [f for f in answer.figures if f["arm"] == "baseline"], "not asked for"
    answer.figures = [f for f in answer.figures if f["arm"] != "baseline"]
    if not baseline and not arguments.no_baseline:
        baseline, why = baseline_figures(arguments)
    join(answer.figures, baseline)
    slower = []
    for figure in answer.figures:
        print(figure_words(figure))
        if earlier is not None:
            figure["against"] = compared(figure, earlier)
            print(f"    {against_words(figure['against'], arguments.against)}")
            if figure["against"] and figure["against"]["slower"]:
                slower.append(figure)
    if not baseline:
        print(f"no baseline arm: {why}")
    elif not any("ratio" in figure for figure in answer.figures):
        print("the baseline arm has no figure of the same work")
    if earlier is not None and not any(figure["against"] for figure in answer.figures):
        raise RefusedError(f"{arguments.against}: has none of these figures")
    if arguments.json is not None:
        files.write_text(arguments.json, json.dumps(report(what, answer), indent=1) + "\n")
    if slower:
        names = ", ".join(f"{figure['name']} T={figure['rows']}" for figure in slower)
        print(f"lowlat: slower than {arguments.against}: {names}", file=sys.stderr)
        return REFUSED
    return DONE


def check_case(arguments: argparse.Namespace, platform: str = "nvidia") -> None:
    """Fills in what was left out and refuses what does not go together."""
    if platform == "scalar":
        if arguments.what != "layer" or arguments.gpus not in (None, 1):
            raise UsageError("--platform scalar is of bench layer, and takes no --gpus")
        arguments.schedule = arguments.schedule or "persistent"
    arguments.schedule = arguments.schedule or "fused"
    ranks, gpus = (2, 2) if arguments.what == "exchange" else (4, 1)
    if platform == "scalar":
        ranks = 1
    arguments.rows = arguments.rows or [12 if arguments.what == "exchange" else 6]
    arguments.tp = ranks if arguments.tp is None else arguments.tp
    arguments.gpus = gpus if arguments.gpus is None else arguments.gpus
    if arguments.gpus not in (1, arguments.tp):
        raise UsageError(f"--gpus is {arguments.gpus}; needed 1 or as many as --tp {arguments.tp}")


def program_of(arguments: argparse.Namespace) -> str:
    """V4's layers are of several kinds and have a program of their own, and so have v41's by the
    persistent schedule."""
    if arguments.platform == "scalar":
        return f"{arguments.what}_scalar"
    if arguments.what == "layer" and arguments.model == "v4":
        return "layer_v4"
    by_schedule = {("layer", "persistent"): "layer_resident"}
    return by_schedule.get((arguments.what, arguments.schedule), arguments.what)


def program_words(arguments: argparse.Namespace) -> list[str]:
    return [
        *case_words(arguments),
        *("--schedule", arguments.schedule),
        *("--repeats", str(arguments.repeats)),
    ]


def case_words(arguments: argparse.Namespace) -> list[str]:
    rows = ",".join(map(str, arguments.rows))
    case = (("model", arguments.model), ("tp", arguments.tp), ("gpus", arguments.gpus))
    return [str(word) for name, value in (*case, ("rows", rows)) for word in (f"--{name}", value)]


def report(what: str, answer: measure.Answer) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "what": what,
        "version": version(),
        "machine": {name: value for name, value in answer.machine.items() if name != "kind"},
        "checks": [without_kind(check) for check in answer.checks],
        "figures": [without_kind(figure) for figure in answer.figures],
    }


def without_kind(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "kind"}


# --------------------------------------------------------------------- the baseline arm


def baseline_figures(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Figures of the same work by torch; or none, and why."""
    if program_of(arguments) == "layer_v4":
        return [], "its layer has 640 keys of one kind, and V4's are of other kinds"
    script = installed_file(measure.ROOM, "baseline_layer.py")
    words = [arguments.python, str(script), *case_words(arguments)]
    try:
        _, answer = measure.run(
            [*words, "--what", arguments.what, "--repeats", str(arguments.repeats)],
            "the baseline arm",
        )
    except FaultError as error:
        return [], one_line(error)
    return answer.figures, answer.refusal or "it gave no figure"


def join(figures: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> None:
    """Gives each figure the baseline's of the same work, and the ratio."""
    key = ("name", "model", "tp", "gpus", "rows")
    others = {tuple(other[name] for name in key): other for other in baseline}
    for figure in figures:
        other = others.get(tuple(figure[name] for name in key))
        if other is not None:
            figure["baseline"] = without_kind(other)
            figure["ratio"] = other["median"] / figure["median"]


# --------------------------------------------------------------------- an earlier run


def read_earlier(path: Path, what: str) -> dict[str, Any]:
    earlier = files.read_json(path, SCHEMA, SCHEMA_VERSION, "bench --json")
    if earlier.get("what") != what:
        raise RefusedError(f"{path}: is of bench {earlier.get('what')}; needed one of bench {what}")
    try:
        for figure in earlier["figures"]:
            if not all(figure[name] > 0 for name in ("median", "low", "high")):
                raise ValueError("a time that is not above 0")
            tuple(figure[name] for name in KEY)
        str(earlier["machine"]["gpu"])
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(f"{path}: a figure is broken ({one_line(error)})") from error
    return earlier


def compared(figure: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any] | None:
    """How the figure stands to the earlier run's; None where that has no such figure."""
    for old in earlier["figures"]:
        if all(old[name] == figure[name] for name in KEY):
            break
    else:
        return None
    noise = max(LEAST_NOISE, *((f["high"] - f["low"]) / f["median"] for f in (old, figure)))
    change = figure["median"] / old["median"] - 1
    return {"median": old["median"], "change": change, "noise": noise, "slower": change > noise}


# --------------------------------------------------------------------- words


def machine_words(machine: dict[str, Any]) -> str:
    words = [f"{machine['gpus']} x {machine['gpu']}"]
    if machine["clock_mhz"]:
        words.append(f"{machine['clock_mhz']:.0f} MHz")
    words.append(f"read {machine['read_bytes_per_s'] * 1e-12:.3g} TB/s")
    if machine.get("cuda"):
        words.append(f"CUDA {machine['cuda']}")
    return ", ".join(words)


def figure_words(figure: dict[str, Any]) -> str:
    case = f"{figure['name']} {figure['model']} {figure['schedule']} tp{figure['tp']}"
    words = f"{case} T={figure['rows']:<2}  {time_words(figure)}"
    if "floor" in figure:
        size = figure["bytes"] * 1e-6
        words += f"  {size:.1f} MB  floor {figure['floor']:.1f}  share {figure['share']:.2f}"
    if "ratio" in figure:
        words += f"\n    baseline  {time_words(figure['baseline'])}  {figure['ratio']:.2f} x ours"
    return words


def time_words(figure: dict[str, Any]) -> str:
    low, high = figure["low"], figure["high"]
    return f"median {figure['median']:.2f} {figure['unit']}  low {low:.2f}  high {high:.2f}"


def against_words(against: dict[str, Any] | None, path: Path) -> str:
    if against is None:
        return f"not in {path}"
    change, noise = against["change"] * 100, against["noise"] * 100
    state = "SLOWER" if against["slower"] else "within" if change > -noise else "faster"
    old = f"{against['median']:.2f} in {path.name}"
    return f"{change:+.1f} % against {old}, noise {noise:.1f} %: {state}"
