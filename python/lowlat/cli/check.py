"""``lowlat check``: whether these kernels can serve a model so, with no GPU and no engine here."""

import argparse
import json
from pathlib import Path

from lowlat.cli import engine
from lowlat.cli.outcome import (
    DONE,
    EXIT_STATUSES,
    REFUSED,
    FaultError,
    RefusedError,
    UsageError,
    one_line,
)
from lowlat.cli.parts import native

NAME = "check"
CONFIG_FILE = "config.json"
# To map the files of a checkpoint and read their headers.
BUDGET_S = 120

DESCRIPTION = """\
Asks the guard whether these kernels can serve a model with the given server options, and prints
every reason against it, numbered; or, where it can be served, what the model takes of each rank's
memory. Of a checkpoint folder with weights the headers of its files are checked too: every tensor
with its dtype and shape. Exit status 0: can be served; 1: cannot.
"""

EPILOG = f"""\
examples:
  lowlat check --model v4-flash --tp 4
  lowlat check --model path/to/checkpoint --tp 4 --isa sm_90 --page-size 256 \\
      --moe-runner-backend marlin --context 131072 --requests 8

{EXIT_STATUSES}"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        NAME,
        help="say whether a model can be served, and every reason why not",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR|NAME",
        help="folder or file of a config.json, or a built-in model (tiny-v4, v4-flash, tiny-v41,"
        " v41-flash)",
    )
    parser.add_argument("--tp", type=count, default=1, metavar="N", help="tensor-parallel size")
    parser.add_argument(
        "--isa", default="scalar", help="scalar, sm_90, gfx950 or gfx942; default %(default)s"
    )
    parser.add_argument(
        "--page-size", type=count, metavar="TOKENS", help="the server's --page-size"
    )
    parser.add_argument("--moe-runner-backend", metavar="NAME", help="the server's option")
    parser.add_argument(
        "--context", type=count, metavar="TOKENS", help="plan caches for requests of so many tokens"
    )
    parser.add_argument(
        "--requests", type=count, metavar="N", help="so many requests at a time; needs --context"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print {servable, reasons, memory, checkpoint} as JSON",
    )
    parser.set_defaults(run=run)


def count(text: str) -> int:
    """A whole number from 1 that 31 bits hold."""
    most = (1 << 31) - 1
    if text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= most:
        return int(text)
    seen = text if len(text) <= 40 else f"{text[:40]}..."
    raise argparse.ArgumentTypeError(f"{seen!r} is no whole number from 1 to {most}")


def run(arguments: argparse.Namespace) -> int:
    if arguments.requests is not None and arguments.context is None:
        raise UsageError("--requests needs --context: how many tokens each of them has")
    options = {
        "isa": arguments.isa,
        "tp_size": arguments.tp,
        "page_size": arguments.page_size,
        "moe_runner_backend": arguments.moe_runner_backend,
    }
    given = present(options)
    config = read_config(arguments.model)
    try:
        reasons = native("_dispatch").check(config, json.dumps(given))
    except ValueError as error:
        raise RefusedError(f"{arguments.model}: {one_line(error)}") from error
    checkpoint = None
    if not reasons:
        checkpoint, refusal = check_weights(arguments.model)
        reasons = [refusal] if refusal else []
    memory, table = (None, "") if reasons else plan(arguments, config)
    if arguments.json:
        answer = {
            "servable": not reasons,
            "reasons": reasons,
            "memory": memory,
            "checkpoint": checkpoint,
        }
        print(json.dumps(answer, indent=2))
    elif reasons:
        print(f"{arguments.model} cannot be served so ({len(reasons)}):")
        for number, reason in enumerate(reasons, 1):
            print(f"  {number}. {reason}")
    else:
        print(f"{arguments.model} can be served: isa {arguments.isa}, tp {arguments.tp}")
        if checkpoint is not None:
            print(checkpoint)
        print(table, end="")
    return REFUSED if reasons else DONE


def check_weights(model: str) -> tuple[str | None, str | None]:
    """What was looked at beside the configuration, and the line against it. The engine reads the
    headers as it does when it serves the folder."""
    if native("_dispatch").built_in(model) is not None:
        return None, None
    folder = Path(model)
    if not folder.is_dir():
        return f"only {CONFIG_FILE} was checked", None
    if not any(folder.glob("*.safetensors*")):
        return f"only {CONFIG_FILE} was checked: no weights beside it", None
    done = engine.ask(["check-checkpoint", "--", model], BUDGET_S)
    if done.returncode == DONE:
        return f"checked: {CONFIG_FILE}, and every header: {one_line(done.stdout)}", None
    words = one_line(done.stderr)
    if done.returncode != REFUSED:
        raise FaultError(words)
    return None, words.partition(": refused: ")[2] or words


def plan(arguments: argparse.Namespace, config: str) -> tuple[dict, str]:
    """What the model takes of each rank's memory: as JSON's objects, and as a table."""
    options = {
        "tp_size": arguments.tp,
        "page_size": arguments.page_size,
        "context": arguments.context,
        "requests": arguments.requests,
    }
    try:
        text, table = native("_dispatch").memory_plan(config, json.dumps(present(options)))
    except ValueError as error:
        raise RefusedError(f"{arguments.model}: {one_line(error)}") from error
    return json.loads(text), table


def present(options: dict) -> dict:
    """The options that were given."""
    return {key: value for key, value in options.items() if value is not None}


def read_config(model: str) -> str:
    """The text of the model's config.json: a built-in name, a folder or the file itself."""
    dispatch = native("_dispatch")
    built_in = dispatch.built_in(model)
    if built_in is not None:
        return built_in
    path = Path(model)
    try:
        if path.is_dir():
            path = path / CONFIG_FILE
        # A pipe may never end, and a device has no end.
        if path.exists() and not path.is_file():
            raise RefusedError(f"{path}: not a regular file; needed a {CONFIG_FILE}")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RefusedError(
            f"{model}: neither a built-in model ({', '.join(dispatch.built_in_names())})"
            f" nor a folder with a {CONFIG_FILE}"
        ) from None
    except UnicodeDecodeError:
        raise RefusedError(f"{path}: not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
