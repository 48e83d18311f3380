"""``lowlat doctor``: what this machine can do, found by doing it."""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lowlat.cli.engine import BINARY
from lowlat.cli.outcome import DONE, EXIT_STATUSES, REFUSED, CommandError, one_line
from lowlat.cli.parts import installed_file, version
from lowlat.env import whole_search_path

NAME = "doctor"
SCHEMA = "lowlat.doctor"
SCHEMA_VERSION = 1

OK, NONE, BROKEN = "ok", "none", "broken"
COLUMNS = 100
# A look at a tool or a library; and two ranks that start, agree and run some steps.
LOOK_BUDGET_S = 30
RANKS_BUDGET_S = 180

REINSTALL = "install lowlat again (pip install . in its repository)"
LIBRARY = ("_lib", "liblowlat_kernels.so")
OLDEST_PYTHON = (3, 10)

DESCRIPTION = """\
Tries what lowlat needs and what it can use, and says of each what was tried, what happened and,
where something is wrong or missing, what changes it:

  ok      it works
  none    not there; lowlat runs without it
  broken  lowlat itself needs it, or it is there and does not work

Each foreign library is loaded in a process of its own, so that one that crashes is a line here.
Exit status 1 when something that lowlat itself needs is broken, else 0.
"""


@dataclass(frozen=True)
class Check:
    """One line of the answer. `change` is empty where nothing needs to change."""

    name: str
    status: str
    needed: bool
    tried: str
    happened: str
    change: str = ""


class NoAnswerError(Exception):
    """A child did not say what was asked; the words say why."""


EPILOG = f"""\
examples:
  lowlat doctor
  lowlat doctor --json > doctor.json

{EXIT_STATUSES}"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        NAME,
        help="try what lowlat needs on this machine, and say what to change",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print {healthy, checks} as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    checks = []
    for check in all_checks():
        checks.append(check)
        if not arguments.json:
            print(as_text(check), flush=True)
    healthy = is_healthy(checks)
    if arguments.json:
        answer = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "healthy": healthy}
        print(json.dumps(answer | {"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print("lowlat works here" if healthy else "lowlat does not work here: see what is broken")
    return DONE if healthy else REFUSED


def is_healthy(checks: Sequence[Check]) -> bool:
    return not any(check.needed and check.status != OK for check in checks)


def as_text(check: Check) -> str:
    words = f"{check.tried}: {check.happened}"
    if check.change:
        words += f"; to change it: {check.change}"
    head = f"{check.status:<7} {check.name:<16} "
    lines = textwrap.wrap(words, COLUMNS - len(head), break_on_hyphens=False)
    return head + f"\n{' ' * len(head)}".join(lines)


def all_checks() -> Iterator[Check]:
    """Every check, as soon as it has its answer."""
    yield python_check()
    yield numpy_check()
    yield package_check()
    yield kernels_check()
    yield face_check("kernels' face", "lowlat._kernels", "abi_version")
    yield face_check("dispatcher", "lowlat._dispatch", "version")
    yield engine_check()
    yield ranks_check()
    yield compiler_check()
    yield tool_check("cargo", ["cargo"], "install Rust 1.85 or newer to build lowlat")
    yield nvcc_check()
    yield hip_compiler_check()
    yield devices_check("NVIDIA GPUs", "cuda", "libcuda.so.1", "the NVIDIA driver")
    yield from gpu_kernels_checks(NVIDIA)
    yield devices_check("AMD GPUs", "hip", "libamdhip64.so", "the ROCm runtime")
    yield from gpu_kernels_checks(AMD)
    yield sglang_check()


# --------------------------------------------------------------------- asking


def look(
    command: Sequence[str],
    budget_s: float = LOOK_BUDGET_S,
    cwd: str | None = None,
    env: dict[str, str] | None = None,
) -> str:
    """What the command prints; NoAnswerError where it fails, hangs or does not start."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=budget_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer within {budget_s:.0f} s") from None
    except OSError as error:
        raise NoAnswerError(f"does not start: {error.strerror or one_line(error)}") from error
    if done.returncode < 0:
        raise NoAnswerError(f"died of signal {-done.returncode}")
    if done.returncode > 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise NoAnswerError(f"exit status {done.returncode}: {one_line(' '.join(last) or '-')}")
    return done.stdout


def ask(*words: str) -> dict[str, Any]:
    """The answer of ``lowlat.cli.probe``, whose process may crash."""
    with tempfile.TemporaryDirectory() as empty:  # else a json.py lying about would be imported
        command = [sys.executable, "-m", "lowlat.cli.probe", *words]
        answer = json.loads(look(command, cwd=empty, env=whole_search_path()))
    if "error" in answer:
        raise NoAnswerError(answer["error"])
    return answer


# --------------------------------------------------------------------- what lowlat needs


def python_check() -> Check:
    seen, oldest = sys.version_info[:3], ".".join(map(str, OLDEST_PYTHON))
    fits = seen >= OLDEST_PYTHON
    return Check(
        "Python",
        OK if fits else BROKEN,
        True,
        "this interpreter",
        f"{platform.python_implementation()} {platform.python_version()}",
        "" if fits else f"run lowlat with Python {oldest} or newer",
    )


def numpy_check() -> Check:
    tried = "import numpy"
    try:
        return Check("numpy", OK, True, tried, str(ask("module", "numpy")["__version__"]))
    except (NoAnswerError, KeyError) as error:
        return Check("numpy", BROKEN, True, tried, one_line(error), "pip install numpy")


def package_check() -> Check:
    tried = "version of the installed package"
    try:
        return Check("lowlat", OK, True, tried, version())
    except CommandError as error:
        return Check("lowlat", BROKEN, True, tried, one_line(error), REINSTALL)


def kernels_check() -> Check:
    tried = "load the kernel library"
    try:
        library = installed_file(*LIBRARY)
        tried = f"load {'/'.join(LIBRARY)}"
        answer = ask("kernels", str(library))
    except (NoAnswerError, CommandError) as error:
        return Check("kernels", BROKEN, True, tried, one_line(error), REINSTALL)
    platforms = ", ".join(answer["platforms"])
    happened = f"ABI {answer['abi']}, {answer['ops']} operations, built for {platforms}"
    return Check("kernels", OK, True, tried, happened)


def face_check(name: str, module: str, key: str) -> Check:
    tried = f"import {module}"
    try:
        answer = ask("module", module)
        words = f"{key.replace('_', ' ')} {answer[key]}"
        if key == "version" and answer[key] != version():
            needed = f"{words}; the package is {version()}"
            return Check(name, BROKEN, True, tried, needed, REINSTALL)
        return Check(name, OK, True, tried, words)
    except (NoAnswerError, CommandError, KeyError) as error:
        return Check(name, BROKEN, True, tried, one_line(error), REINSTALL)


def engine_check() -> Check:
    tried = "run lowlat-engine --version"
    try:
        words = look([str(installed_file(*BINARY)), "--version"]).strip()
        if words.rsplit(" ", 1)[-1] != version():
            needed = f"{words}; the package is {version()}"
            return Check("engine", BROKEN, True, tried, needed, REINSTALL)
        return Check("engine", OK, True, tried, words)
    except (NoAnswerError, CommandError) as error:
        return Check("engine", BROKEN, True, tried, one_line(error), REINSTALL)


def ranks_check() -> Check:
    """A request through guard, vote, capture and replay on two ranks that sum for real."""
    tried = "replay one request on 2 scalar ranks"
    try:
        with tempfile.TemporaryDirectory() as folder:
            trace, out = Path(folder, "trace.json"), Path(folder, "out")
            request = {"t": 0, "type": "n", "in": 24, "out": 8, "hash_ids": [1]}
            trace.write_text(json.dumps({"id": "d", "block_size": 24, "requests": [request]}))
            engine = str(installed_file(*BINARY))
            words = ["replay", str(trace), "--tp", "2", "--max-batch", "1", "--report", str(out)]
            look([engine, *words], RANKS_BUDGET_S, cwd=folder)
            report = json.loads((out / "report.json").read_text())
    except (NoAnswerError, CommandError, OSError) as error:
        change = "the line says what; a fault here is a bug of lowlat unless memory ran out"
        return Check("two ranks", BROKEN, True, tried, one_line(error), change)
    covered, tokens = report["steps"]["target"]["covered"], report["totals"]["output_tokens"]
    happened = f"{tokens} tokens, {covered} covered steps, equal on both ranks"
    if tokens != 8 or covered == 0:
        return Check("two ranks", BROKEN, True, tried, happened, "8 tokens by covered steps needed")
    return Check("two ranks", OK, True, tried, happened)


# --------------------------------------------------------------------- what lowlat can use


def tool_check(name: str, candidates: Sequence[str], change: str) -> Check:
    """The first of the candidates that is there tells its version."""
    for candidate in candidates:
        path = shutil.which(candidate)
        if path is None:
            continue
        tried = f"{path} --version"
        try:
            text = look([path, "--version"])
        except NoAnswerError as error:
            return Check(name, BROKEN, False, tried, one_line(error), change)
        lines = [line for line in text.splitlines() if re.search(r"\d+\.\d+", line)]
        return Check(name, OK, False, tried, one_line((lines or ["no version"])[0]))
    return Check(name, NONE, False, f"find {' or '.join(candidates)}", "not found", change)


def compile_check(name: str, candidates: Sequence[str], words: Sequence[str], change: str) -> Check:
    """Whether the first compiler that is there takes an empty file with these options."""
    found = tool_check(name, candidates, change)
    path = next(filter(None, map(shutil.which, candidates)), None)
    if found.status != OK or path is None:
        return found
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cpp")
        source.write_text("")
        tried = f"{path} {' '.join(words)}"
        try:
            look([path, *words, str(source)], cwd=folder)
        except NoAnswerError as error:
            return Check(name, BROKEN, False, tried, one_line(error), change)
    return Check(name, OK, False, tried, found.happened)


def compiler_check() -> Check:
    change = "install g++ 12 or newer to build lowlat"
    words = ("-std=c++20", "-fsyntax-only")
    return compile_check("C++ compiler", ("c++", "g++", "clang++"), words, change)


def nvcc_check() -> Check:
    packages = Path(sysconfig.get_paths()["purelib"], "nvidia")
    fetched = sorted(map(str, packages.glob("cu*/bin/nvcc")), reverse=True)
    change = "install the CUDA toolkit to build kernels for NVIDIA GPUs"
    return tool_check("CUDA compiler", ("nvcc", "/usr/local/cuda/bin/nvcc", *fetched), change)


def hip_compiler_check() -> Check:
    rocm = ("amdclang++", "/opt/rocm/llvm/bin/clang++")
    clangs = tuple(f"clang++-{number}" for number in range(24, 19, -1))
    words = ("-x", "hip", "--offload-arch=gfx950", "--cuda-device-only", "-nogpuinc", "-nogpulib")
    change = "install clang 20 or newer with the AMDGPU target to build kernels for AMD GPUs"
    candidates = (*rocm, *clangs, "clang++")
    return compile_check("HIP compiler", candidates, (*words, "-fsyntax-only"), change)


def devices_check(name: str, question: str, library: str, brings: str) -> Check:
    tried = f"ask {library} for devices"
    try:
        devices = ask(question)["devices"]
    except NoAnswerError as error:
        words = one_line(error)
        absent = "cannot open shared object" in words or "no such file" in words.lower()
        change = f"with such a GPU here, install {brings}"
        return Check(name, NONE if absent else BROKEN, False, tried, words, change)
    if not devices:
        return Check(name, NONE, False, tried, "no device", "nothing, unless one should be here")
    return Check(name, OK, False, tried, f"{len(devices)}: {', '.join(devices)}")


@dataclass(frozen=True)
class Vendor:
    """What the lines of a vendor's kernels say."""

    word: str  # the kernel library's
    name: str
    runtime: str  # what `toolkit` of the answer is
    build: str  # brings kernels into the library
    driver: str  # brings devices that are not seen
    archs: str  # builds for the devices that are here
    joined: str  # GPUs that can be ranks


NVIDIA = Vendor(
    "nvidia",
    "NVIDIA",
    "CUDA {toolkit}, built for {architectures}; driver for CUDA {driver}",
    "build lowlat where nvcc is (LOWLAT_PIP_CUDA=1 pip install . fetches one)",
    "nothing, unless a GPU should be here; then install its driver",
    "build lowlat for these GPUs (LOWLAT_CUDA_ARCHS)",
    "GPUs of one host, joined by NVLink or PCIe with peer access, serve as ranks",
)
AMD = Vendor(
    "amd",
    "AMD",
    "{toolkit}, code for {architectures}",
    "build lowlat where a clang for AMD parts is (LOWLAT_PIP_HIP=1 pip install . fetches one)",
    "nothing, unless a GPU should be here; then install ROCm 6 or 7 and see rocminfo",
    "gfx942 (MI300X, MI325X) and gfx950 (MI350X, MI355X) are built; rocminfo names the part",
    "GPUs of one host that reach each other serve as ranks (rocm-smi --showtopoaccess)",
)


def gpu_kernels_checks(vendor: Vendor) -> Iterator[Check]:
    """Whether the library's own kernels run on the GPUs here, and reach from one to the other."""
    name, tried = f"{vendor.name} kernels", "run this library's kernels on every GPU"
    try:
        answer = ask("devices", str(installed_file(*LIBRARY)))[vendor.word]
    except (NoAnswerError, CommandError, KeyError) as error:
        yield Check(name, BROKEN, False, tried, one_line(error), REINSTALL)
        return
    if not answer["built"]:
        words = answer["refusal"] or "the library has none"
        yield Check(name, NONE, False, tried, words, vendor.build)
        return
    built = vendor.runtime.format(**answer)
    if answer["refusal"]:
        # Without a device there is no driver to tell of.
        seen = built.partition(";")[0].removeprefix(", ")  # an absent runtime has no name
        yield Check(name, NONE, False, tried, f"{seen}; {answer['refusal']}", vendor.driver)
        return
    refused = [
        f"GPU {idx}{' (' + device['isa'] + ')' if device['isa'] else ''}: {device['refusal']}"
        for idx, device in enumerate(answer["devices"])
        if device["refusal"]
    ]
    words = "; ".join((built, *refused))
    status = BROKEN if refused else OK
    change = vendor.archs if refused else ""
    runs = len(answer["devices"]) - len(refused)
    yield Check(name, status, False, tried, f"they run on {runs}; {words}", change)
    if answer.get("fused"):
        yield fused_check(answer["fused"])
    if answer["peers"]:
        yield peer_check(answer["peers"], vendor)


def fused_check(kernels: Sequence[dict[str, Any]]) -> Check:
    words = "; ".join(f"{k['name']} ({k['shapes']}; {k['rows']})" for k in kernels)
    return Check("fused kernels", OK, False, "ask the library for its fused kernels", words)


def peer_check(peers: Sequence[dict[str, Any]], vendor: Vendor) -> Check:
    lost = [f"{p['from']} to {p['to']}: {p['refusal']}" for p in peers if p["refusal"]]
    words = "; ".join((f"{len(peers) - len(lost)} of {len(peers)} arrived", *lost))
    return Check(
        f"{vendor.name} peer access",
        BROKEN if lost else OK,
        False,
        "a store by a kernel on each GPU into the memory of each other",
        words,
        vendor.joined if lost else "",
    )


def sglang_check() -> Check:
    """SGLang's version, and that of its plugin contract as its files state it: importing it would
    bring torch."""
    tried = "look for the installed sglang"
    try:
        found = metadata.distribution("sglang")
    except metadata.PackageNotFoundError:
        change = "to serve by SGLang: pip install sglang"
        return Check("SGLang", NONE, False, tried, "not installed", change)
    contracts = []
    for vendor in ("nvidia", "amd"):
        spec = Path(str(found.locate_file(f"sglang/kernels/plugin_kernels/{vendor}/spec.py")))
        try:
            text = spec.read_text(encoding="utf-8")
        except OSError:
            continue
        stated = re.search(r"^\w*API_VERSION\b[^=\n]*=\s*(\d+)", text, re.MULTILINE)
        contracts.append(f"{vendor} {stated[1] if stated else 'of unknown version'}")
    if not contracts:
        change = "a version with kernel plugins (0.5.23)"
        return Check("SGLang", NONE, False, tried, f"{found.version}, no plugin contract", change)
    happened = f"{found.version}, plugin contract: {', '.join(contracts)}"
    return Check("SGLang", OK, False, tried, happened)
