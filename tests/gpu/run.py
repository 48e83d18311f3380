"""Runs every test that needs a GPU, and ends with one count.

    python tests/gpu/run.py [--build-dir build/py | --programs DIR] [--only NAME[:CASE],...]
                            [--sanitizer also|not|only] [--logs DIR]

In order: the C++ programs of tests/gpu, each with a limit of its own; the operations against the
oracle with the platform nvidia among the platforms, and at the models' own sizes; some cases of the
programs under compute-sanitizer's memcheck and racecheck. Cases that need two GPUs skip themselves
where one is visible (CUDA_VISIBLE_DEVICES counts), and every skip is shown with its reason.

Without --programs the programs are built first. With it nothing is built or fetched: DIR holds what
`make gpu-pack` made elsewhere (programs, and in DIR/site the package and pytest), and only the
standard library of Python 3.10 or newer is needed beside it. --only keeps the programs and parts
("operations") named, and of a program the cases that contain CASE. Everything printed lies in a
file of DIR a program (build/gpu-test). The last line is "N passed, N failed, N skipped"; exit
status 1 when anything failed or nothing could run.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from runner import (
    CASES,
    ROOT,
    Count,
    NoGpuError,
    count_of_suites,
    counted,
    run,
    visible_gpus,
)

BUILD_BUDGET_S = 3600
OPERATIONS_BUDGET_S = 600
SANITIZER_BUDGET_S = 240
PROGRAM_LIMIT_S = 60
# Those that compare with float64 on the host at true sizes, or replay for long.
LIMITS_S = {
    "gpu_layer": 120,
    "gpu_layer_v4": 300,
    "gpu_model": 240,
    "gpu_moe": 180,
    "gpu_moe_wide": 240,
    "gpu_ops": 300,
    "gpu_step": 180,
}
PROGRAMS = sorted(
    f"gpu_{path.stem.removeprefix('test_')}" for path in (ROOT / "tests/gpu").glob("test_*.cu")
)
TOOLS = ("memcheck", "racecheck")
# racecheck takes a barrier's arrival for one lane's own, though __syncwarp brought its warp's
# accesses together before it: to it the experts' kernels are full of races (docs/gpu-tests.md).
NO_RACECHECK = ("gpu_layer", "gpu_layer_v4", "gpu_moe", "gpu_moe_wide", "gpu_step")
# Programs, and the word of the cases that a tool which is a thousand times slower gets through.
SANITIZED = (
    ("gpu_attention", "brief"),
    ("gpu_attention_v4", "brief"),
    ("gpu_devices", ""),
    ("gpu_draft", "small"),
    ("gpu_draft_accept", "small"),
    ("gpu_index", "brief"),
    ("gpu_layer", "brief"),
    ("gpu_layer_v4", "brief"),
    ("gpu_model", "v4_one_rank_eager"),
    ("gpu_moe", "brief"),
    ("gpu_moe_wide", "brief"),
    ("gpu_ops", "small"),
    ("gpu_platform", ""),
    ("gpu_step", "brief"),
)
OPERATIONS = (
    "tests/python/test_ops_random.py",
    "tests/python/test_ops_awkward.py",
    "tests/python/test_ops_golden.py",
    "tests/python/test_ops_constants.py",
    "tests/gpu",
)
# What is shown of a failed program: its complaints, or else its end. All of it is in its log.
COMPLAINT = re.compile(r"^(FAIL|\S+:\d+: |=+ (Error|Warning|Invalid|Program))|fault|expired")
SHOWN_LINES = 40


@dataclass
class Result:
    name: str
    count: Count
    seconds: float
    skips: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Wanted:
    """What --only names: programs and parts, each with the word of its cases."""

    words: tuple[tuple[str, str], ...]

    @staticmethod
    def parse(text: str) -> "Wanted":
        pairs = (word.partition(":") for word in text.split(",") if word)
        return Wanted(tuple((name, case) for name, _, case in pairs))

    def cases(self, name: str) -> list[str]:
        """Words to run `name` with, one run each; none when it is not wanted."""
        if not self.words:
            return [""]
        return [case for word, case in self.words if word == name]


class Tests:
    """One run: where programs lie, where logs go, and the results so far."""

    def __init__(self, programs: Path, logs: Path, wanted: Wanted) -> None:
        self.programs, self.logs, self.wanted = programs, logs, wanted
        self.env = dict(os.environ)
        self.results: list[Result] = []
        site = programs / "site"
        if site.is_dir():
            old = self.env.get("PYTHONPATH")
            self.env["PYTHONPATH"] = f"{site}{os.pathsep}{old}" if old else str(site)
        logs.mkdir(parents=True, exist_ok=True)

    def take(self, result: Result) -> None:
        self.results.append(result)
        print(f"== {result.name}: {result.count} ({result.seconds:.1f} s)", flush=True)

    def skip(self, name: str, why: str) -> None:
        self.take(Result(name, Count(skipped=1), 0.0, [f"{name}: {why}"]))

    def command(self, name: str, command: list[str], limit_s: float) -> tuple[int, str, float]:
        begin = time.monotonic()
        status, output = run(command, self.env, limit_s, show=False)
        seconds = time.monotonic() - begin
        (self.logs / f"{re.sub(r'[^a-z0-9_]+', '-', name)}.log").write_text(output)
        if status not in (0, 77):
            lines = output.splitlines()
            wrong = [line for line in lines if COMPLAINT.search(line)][:SHOWN_LINES]
            print("\n".join(wrong or lines[-SHOWN_LINES:]))
            why = f"no end within {limit_s} s" if seconds >= limit_s else f"status {status}"
            print(f"{name}: {why}")
        return status, output, seconds

    def program(self, name: str, case: str) -> None:
        label = f"{name} {case}" if case else name
        path = self.programs / name
        if not path.is_file():
            self.skip(label, f"not in {self.programs}")
            return
        limit_s = LIMITS_S.get(name, PROGRAM_LIMIT_S)
        command = [str(path), *([case] if case else [])]
        status, output, seconds = self.command(label, command, limit_s)
        found = CASES.findall(output)
        count = Count(*map(int, found[-1])) if found else Count()
        # 77: all were skipped, and the program says why.
        count = counted(count, 0 if status == 77 else status)
        skips = re.findall(r"^skipped (.*)$", output, re.MULTILINE)
        self.take(Result(label, count, seconds, [f"{name} {skip}" for skip in skips]))

    def operations(self) -> None:
        name = "operations"
        for module in ("numpy", "ml_dtypes", "pytest", "lowlat._kernels"):
            tried = subprocess.run(
                [sys.executable, "-c", f"import {module}"],
                env=self.env,
                capture_output=True,
                text=True,
                timeout=120,
            )
            if tried.returncode != 0:
                last = (tried.stderr.strip().splitlines() or ["no word"])[-1]
                version = f"{sys.version_info.major}.{sys.version_info.minor}"
                self.skip(name, f"import {module} in Python {version}: {last}")
                return
        report = self.logs / "operations.xml"
        report.unlink(missing_ok=True)
        words = [sys.executable, "-m", "pytest", "-rs", f"--junit-xml={report}", *OPERATIONS]
        if importlib.util.find_spec("xdist") is not None:
            words += ["-n", str(min(12, os.cpu_count() or 1))]
        status, output, seconds = self.command(name, words, OPERATIONS_BUDGET_S)
        skips = re.findall(r"^SKIPPED (.*)$", output, re.MULTILINE)
        count = counted(count_of_suites(report), status)
        self.take(Result(name, count, seconds, skips))

    def sanitizers(self) -> None:
        tool = shutil.which("compute-sanitizer") or shutil.which(
            "compute-sanitizer", path="/usr/local/cuda/bin"
        )
        if tool is None:
            self.skip("compute-sanitizer", "not here; it comes with the CUDA toolkit")
            return
        for program, cases in SANITIZED:
            for check in TOOLS:
                if not self.wanted.cases(program):
                    continue
                if check == "racecheck" and program in NO_RACECHECK:
                    continue
                label = f"{program} {cases} under {check}"
                path = self.programs / program
                if not path.is_file():
                    self.skip(label, f"not in {self.programs}")
                    continue
                command = [tool, "--tool", check, "--error-exitcode", "9", str(path)]
                status, output, seconds = self.command(
                    label, [*command, *filter(None, [cases])], SANITIZER_BUDGET_S
                )
                # Where it cannot attach, as in some containers, it says so.
                cannot = re.search(r"=+ Error: (Unable to|Failed to|.*not supported).*", output)
                if cannot:
                    self.skip(label, cannot.group(0).strip("= "))
                    continue
                if status == 77:
                    self.skip(label, (output.strip().splitlines() or ["no words"])[-1])
                    continue
                self.take(Result(label, Count(int(status == 0), int(status != 0)), seconds))

    def close(self) -> int:
        total = Count()
        print("\nslowest first:")
        for result in sorted(self.results, key=lambda one: -one.seconds):
            total += result.count
            verdict = "FAILED" if result.count.failed else "passed"
            print(f"  {verdict}  {result.seconds:6.1f} s  {result.name}: {result.count}")
        for skip in (skip for result in self.results for skip in result.skips):
            print(f"  skipped  {skip}")
        print(total)
        return 1 if total.failed or total.passed == 0 else 0


def built(build_dir: Path, programs: list[str], env: dict[str, str], what: str) -> bool:
    """Whether the programs could be built; says that `what` cannot be done where not."""
    command = ["cmake", "--build", str(build_dir), "--target", *programs]
    if run(command, env, BUILD_BUDGET_S)[0] == 0:
        return True
    print(f"{what} here: the programs did not build (nvcc: lowlat doctor)")
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build-dir", type=Path, default=Path("build/py"))
    parser.add_argument("--programs", type=Path, help="programs that are built; nothing is built")
    parser.add_argument("--only", default="", help="programs and parts, NAME[:CASE],...")
    parser.add_argument("--sanitizer", choices=("also", "not", "only"), default="also")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/gpu-test")
    arguments = parser.parse_args()

    try:
        print(f"{visible_gpus()} GPU(s)")
    except NoGpuError as error:
        print(f"GPU tests cannot run here: {error}")
        return 1
    programs = (arguments.programs or arguments.build_dir).resolve()
    tests = Tests(programs, arguments.logs.resolve(), Wanted.parse(arguments.only))
    if arguments.programs is None and not built(
        programs, PROGRAMS, tests.env, "GPU tests cannot run"
    ):
        return 1
    if arguments.sanitizer != "only":
        for name in PROGRAMS:
            for case in tests.wanted.cases(name):
                tests.program(name, case)
        if tests.wanted.cases("operations"):
            tests.operations()
    if arguments.sanitizer != "not":
        tests.sanitizers()
    return tests.close()


if __name__ == "__main__":
    sys.exit(main())
