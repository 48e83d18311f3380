"""``lowlat op``: one operation alone, from an .npz file to an .npz file."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowlat.cli.outcome import DONE, EXIT_STATUSES, FaultError, RefusedError, UsageError, one_line
from lowlat.cli.parts import native

if TYPE_CHECKING:
    import numpy as np

NAME = "op"
DEFAULT_MODEL = "v41"

# How each kind of array travels in an .npz file.
NUMPY_DTYPES = {
    "f32": "float32",
    "bf16": "uint16",
    "e4m3": "uint8",
    "ue8m0": "uint8",
    "fp4": "uint8",
    "u8": "uint8",
    "i32": "int32",
    "i64": "int64",
}

DESCRIPTION = """\
Runs one operation on the arrays of an .npz file and writes its outputs as another, so that
anyone can compare it with an oracle of their own. bf16 travels as uint16 bits; e4m3, ue8m0 and
packed fp4 as uint8 codes. Sizes come from the arrays.
"""

EPILOG = f"""\
examples:
  lowlat op --list rms_norm
  lowlat op rms_norm --in case.npz --out stage.npz --platform scalar
  lowlat op rms_norm --in case.npz --out meaning.npz --platform reference
  lowlat op rms_norm --in case.npz --out gpu.npz --platform nvidia

{EXIT_STATUSES}"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        NAME,
        help="run one operation alone (lowlat op --list)",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the operation")
    parser.add_argument("--list", action="store_true", help="list operations, arrays and numerics")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON")
    parser.add_argument("--in", dest="in_path", type=Path, metavar="FILE", help="inputs (.npz)")
    parser.add_argument("--out", dest="out_path", type=Path, metavar="FILE", help="outputs (.npz)")
    parser.add_argument(
        "--platform",
        default="scalar",
        help="reference (float64, the meaning), scalar (the stage) or, in builds with CUDA, nvidia "
        "(the stage on a GPU); default %(default)s",
    )
    parser.add_argument(
        "--model",
        help="whose rules: v41 or v4 (--list says which an operation has, with --model those of "
        f"one); default {DEFAULT_MODEL}",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        if arguments.in_path or arguments.out_path:
            raise UsageError("op --list takes no --in and no --out")
        print_list(operations(), arguments.name, arguments.model, as_json=arguments.json)
        return DONE
    if arguments.json:
        raise UsageError("op --json goes with --list")
    missing = [
        word
        for word, value in (
            ("NAME", arguments.name),
            ("--in FILE", arguments.in_path),
            ("--out FILE", arguments.out_path),
        )
        if value is None
    ]
    if missing:
        raise UsageError(f"op needs {', '.join(missing)} (lowlat op --help)")
    model = DEFAULT_MODEL if arguments.model is None else arguments.model
    run_file(arguments.name, model, arguments.platform, arguments.in_path, arguments.out_path)
    return DONE


def run_file(op: str, model: str, platform: str, in_path: Path, out_path: Path) -> None:
    """Runs `op` on the arrays of `in_path`; `out_path` is written whole or not at all."""
    from lowlat.cli import files, npz

    spec = entry_of(find(operations(), op), model)
    files.check_output(out_path, in_path)
    arrays = npz.read(in_path)
    check_dtypes(in_path, spec, arrays)
    try:
        outputs = native("_kernels").run_op(op, model, platform, arrays)
    except ValueError as error:
        words = one_line(error)
        # The file has no part in where its arrays may be used.
        of = op if words.startswith("platform is ") else in_path
        raise RefusedError(f"{of}: {words}") from error
    except RuntimeError as error:
        raise FaultError(f"{op}: {one_line(error)}") from error
    npz.write(out_path, outputs)


def operations() -> list[dict[str, Any]]:
    return json.loads(native("_kernels").op_list())


def find(ops: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The entries of an operation: one, or one a model where its arrays differ."""
    found = [op for op in ops if op["name"] == name]
    if not found:
        names = ", ".join(dict.fromkeys(op["name"] for op in ops))
        raise RefusedError(f"no operation {name!r}; there are {names}")
    return found


def entry_of(entries: list[dict[str, Any]], model: str) -> dict[str, Any]:
    """The entry of `model`; any where none has it, for the kernel library to refuse."""
    return next((op for op in entries if model in op["models"].split()), entries[0])


def check_dtypes(path: Path, spec: Mapping[str, Any], arrays: "Mapping[str, np.ndarray]") -> None:
    """Refuses another numpy dtype than the operation's, in numpy's words. Names, shapes and values
    are the kernel library's to check."""
    for argument in spec["in"]:
        name = argument["name"]
        needed = NUMPY_DTYPES[argument["dtype"]]
        if name not in arrays or arrays[name].dtype == needed:
            continue
        seen = arrays[name].dtype
        words = f"big-endian {seen.name}" if seen.byteorder == ">" else str(seen)
        kind = "" if argument["dtype"] in ("f32", "i32", "i64") else f" ({argument['dtype']} codes)"
        raise RefusedError(f"{path}: array {name} is {words}; needed {needed}{kind}")


def print_list(
    ops: list[dict[str, Any]], only: str | None, model: str | None, as_json: bool
) -> None:
    if only is not None:
        ops = find(ops, only)
    if model is not None:
        models = sorted({word for op in ops for word in op["models"].split()})
        ops = [op for op in ops if model in op["models"].split()]
        if not ops:
            raise RefusedError(f"--model is {model}; there are operations of {', '.join(models)}")
    if as_json:
        print(json.dumps(ops, indent=2))
        return
    for op in ops:
        print(f"{op['name']} ({op['models']})")
        print(f"    {op['about']}")
        for direction in ("in", "out"):
            for argument in op[direction]:
                print(f"    {direction:3} {describe(argument)}")
        for platform, outputs in op["numerics"].items():
            for output, bound in outputs.items():
                print(f"    numerics {platform} {output}: {bound}")


def describe(argument: Mapping[str, Any]) -> str:
    optional = " (optional)" if argument.get("optional") else ""
    words = f"{argument['name']} {argument['dtype']}[{argument['shape']}]{optional}"
    return f"{words}: {argument['about']}"
