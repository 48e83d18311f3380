"""Runs every test that needs a GPU, and says clearly what is missing where something is.

    python tests/gpu/run.py --build-dir build/py [--quick]

In order: what lowlat finds here (lowlat doctor); the C++ programs (ctest, label "gpu"); the tests
of the operations against the oracle with the platform nvidia among the platforms, and those at the
models' own sizes; the same programs under compute-sanitizer's memcheck and racecheck. --quick
leaves the sanitizer out. Exit status 1 when anything failed or nothing could run.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 1800
PROGRAMS = sorted(
    f"gpu_{path.stem.removeprefix('test_')}" for path in (ROOT / "tests/gpu").glob("test_*.cu")
)
# Programs, and the word of the cases that a tool which is a hundred times slower gets through.
SANITIZED = (
    ("gpu_devices", ""),
    ("gpu_draft", "small"),
    ("gpu_draft_accept", "small"),
    ("gpu_platform", ""),
    ("gpu_ops", "small"),
)
TOOLS = ("memcheck", "racecheck")
OPERATIONS = (
    "tests/python/test_ops_random.py",
    "tests/python/test_ops_awkward.py",
    "tests/python/test_ops_golden.py",
    "tests/python/test_ops_constants.py",
    "tests/gpu",
)


def run(command: list[str], env: dict[str, str] | None = None) -> bool:
    print("$", " ".join(command), flush=True)
    try:
        return subprocess.run(command, cwd=ROOT, env=env, timeout=BUDGET_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"no end within {BUDGET_S} s", flush=True)
        return False


def missing_parts() -> list[str]:
    """What the tests cannot do without, in words that say what brings it."""
    if importlib.util.find_spec("lowlat") is None:
        return ["lowlat is not installed in this Python: make build"]
    from lowlat.cli.doctor import NVIDIA, OK, gpu_kernels_checks

    return [
        f"{check.name}: {check.happened}; {check.change}"
        for check in gpu_kernels_checks(NVIDIA)
        if check.name == "NVIDIA kernels" and check.status != OK
    ]


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", type=Path, default=Path("build/py"))
    parser.add_argument("--quick", action="store_true", help="without compute-sanitizer")
    arguments = parser.parse_args()

    missing = missing_parts()
    if missing:
        for words in missing:
            print(f"GPU tests cannot run here: {words}")
        return 1

    results = {}
    build = str(arguments.build_dir)
    results["build"] = run(["cmake", "--build", build, "--target", *PROGRAMS])
    if results["build"]:
        results["programs"] = run(
            ["ctest", "--test-dir", build, "-L", "gpu", "--output-on-failure", "--no-tests=error"]
        )
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *OPERATIONS]
    if importlib.util.find_spec("xdist") is not None:
        words += ["-n", str(min(12, os.cpu_count() or 1))]
    results["operations"] = run(words)
    tool = sanitizer()
    if arguments.quick:
        print("compute-sanitizer is left out (--quick)")
    elif tool is None:
        print("compute-sanitizer is not here: install it with the CUDA toolkit, or pass --quick")
        results["sanitizer"] = False
    elif results["build"]:
        for program, cases in SANITIZED:
            for check in TOOLS:
                command = [tool, "--tool", check, "--error-exitcode", "9", f"{build}/{program}"]
                results[f"{program} under {check}"] = run([*command, *filter(None, [cases])])
    for name, passed in results.items():
        print(f"{'passed' if passed else 'FAILED'}  {name}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
