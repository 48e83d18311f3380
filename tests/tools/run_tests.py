"""Runs every test that needs no GPU, in all three languages, and ends with one count.

    python run_tests.py --build-dir build/py [--filter WORD]

Each runner's own closing line is printed; the last line is "N passed, N failed, N skipped". A
runner that ends badly without saying why counts as one failure. Exit status 1 when anything failed.
"""

import argparse
import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import runner
from runner import CASES, ROOT, Count, count_of_suites, counted

# No runner may hang; the longest takes a few minutes on two cores.
RUNNER_BUDGET_S = 2400
RUST_RESULT = re.compile(
    r"^test result: \S+ (\d+) passed; (\d+) failed; (\d+) ignored;", re.MULTILINE
)


def run(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    return runner.run(command, env, RUNNER_BUDGET_S)


def closing(name: str, count: Count, status: int) -> Count:
    count = counted(count, status)
    print(f"== {name}: {count}\n", flush=True)
    return count


def run_ctest(build_dir: Path, word: str, env: dict[str, str]) -> Count:
    status, _ = run(["cmake", "--build", str(build_dir)], env)
    if status != 0:
        return closing("ctest", Count(), status)
    report = build_dir / "ctest.xml"
    report.unlink(missing_ok=True)
    command = ["ctest", "--test-dir", str(build_dir), "--output-on-failure", "--no-tests=error"]
    # The engine's Rust tests, which ctest runs when it is used alone, are run by cargo below.
    command += ["--label-exclude", "rust", "--output-junit", str(report.resolve())]
    command += ["--test-output-size-passed", "1000000", "--parallel", str(os.cpu_count() or 1)]
    status, _ = run(command, env | {"LOWLAT_TEST_FILTER": word})
    count = Count()
    if report.is_file():
        for case in ET.parse(report).getroot().iter("testcase"):
            if word and word not in case.get("name", "") and not word_in_cases(case):
                continue
            count += count_of(case)
    return closing("ctest", count, status)


def word_in_cases(case: ET.Element) -> bool:
    """Whether a filtered program ran any of its cases."""
    return any(sum(map(int, found)) for found in CASES.findall(case.findtext("system-out") or ""))


def count_of(case: ET.Element) -> Count:
    """A program of check.hpp says how many cases it ran; any other is one test."""
    found = CASES.findall(case.findtext("system-out") or "")
    status = case.get("status")
    if found and status in ("run", "notrun", "fail"):
        count = Count(*map(int, found[-1]))
        # It crashed after its last case, or a planted race was (not) found by the wrapper.
        if status == "fail" and count.failed == 0:
            count += Count(failed=1)
        return count
    if status == "run":
        return Count(passed=1)
    return Count(failed=1) if status == "fail" else Count(skipped=1)


def run_cargo(build_dir: Path, word: str, env: dict[str, str]) -> Count:
    library = build_dir / "liblowlat_kernels.so"
    if library.is_file():
        env = env | {"LOWLAT_KERNELS": str(library.resolve())}
    command = ["cargo", "test", "--workspace", "--locked", "--no-fail-fast", "--quiet"]
    return rust_results("cargo test", [*command, *([word] if word else [])], env)


def rust_results(name: str, command: list[str], env: dict[str, str]) -> Count:
    status, output = run(command, env)
    count = Count()
    for found in RUST_RESULT.findall(output):
        count += Count(*map(int, found))
    return closing(name, count, status)


def run_loom(_: Path, word: str, env: dict[str, str]) -> Count:
    """The vote under the model checker: another build of lowlat-core, so another folder."""
    target = Path(env.get("CARGO_TARGET_DIR", ROOT / "target")) / "loom"
    flags = f"{env.get('RUSTFLAGS', '')} --cfg loom".strip()
    env = env | {"RUSTFLAGS": flags, "CARGO_TARGET_DIR": str(target)}
    command = ["cargo", "test", "--locked", "--release", "--quiet"]
    command += ["-p", "lowlat-core", "--test", "core_vote_loom"]
    return rust_results("loom", [*command, *([word] if word else [])], env)


def run_pytest(build_dir: Path, word: str, env: dict[str, str]) -> Count:
    report = build_dir / "pytest.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-rs", f"--junit-xml={report}"]
    status, _ = run([*command, *(["-k", word] if word else [])], env)
    no_test_has_the_word = status == 5 and bool(word)
    return closing("pytest", count_of_suites(report), 0 if no_test_has_the_word else status)


def run_sglang(build_dir: Path, word: str, env: dict[str, str]) -> Count:
    """The plugin against the real SGLang, which is installed once; one skip where it cannot be had.
    A run of chosen tests installs nothing."""
    report = build_dir / "sglang.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "tests/tools/run_sglang.py", f"--junit-xml={report}"]
    status, _ = run([*command, *(["--existing", "--filter", word] if word else [])], env)
    count = count_of_suites(report)
    if status == 0 and not report.is_file():
        count = Count(skipped=1)
    return closing("sglang", count, status)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build-dir", type=Path, required=True)
    parser.add_argument("--filter", default="", help="only tests whose name contains this")
    arguments = parser.parse_args()
    build_dir = (ROOT / arguments.build_dir).resolve()
    env = dict(os.environ)
    total = Count()
    for part in (run_ctest, run_cargo, run_loom, run_pytest, run_sglang):
        total += part(build_dir, arguments.filter, env)
    print(total)
    if total.passed + total.failed + total.skipped == 0:
        print(f"no test's name contains {arguments.filter!r}", file=sys.stderr)
        return 1
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
