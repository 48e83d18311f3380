"""What the scripts that run tests share: a command that must end, and counts of what it ran."""

import ctypes
import os
import re
import signal
import subprocess
import threading
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The closing line of a program of check.hpp.
CASES = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$", re.MULTILINE)


@dataclass(frozen=True)
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped
        )

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def run(
    command: list[str], env: dict[str, str], budget_s: float, show: bool = True
) -> tuple[int, str]:
    """Runs a command, and shows what it prints when asked to. Returns its exit status, negative
    where a signal ended it (as it does after `budget_s`), and everything that it printed."""
    print("$", " ".join(command), flush=True)
    lines = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        # The runner's children hold the pipe too, so the whole session goes.
        watch = threading.Timer(budget_s, os.killpg, (process.pid, signal.SIGKILL))
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if show:
                    print(line, end="", flush=True)
            status = process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)
            raise
        finally:
            watch.cancel()
    return status, "".join(lines)


class NoGpuError(Exception):
    """Why there is no GPU to run on."""


def visible_gpus() -> int:
    """How many GPUs the driver shows, after CUDA_VISIBLE_DEVICES; NoGpuError where there is none.
    Loads the driver and no more: neither CUDA's toolkit nor lowlat need be installed."""
    needed = "needed an NVIDIA GPU and its driver"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise NoGpuError(f"no libcuda.so.1 here; {needed}") from None
    count = ctypes.c_int()
    for call in (lambda: driver.cuInit(0), lambda: driver.cuDeviceGetCount(ctypes.byref(count))):
        if (status := call()) != 0:
            raise NoGpuError(f"the driver answers {status}; {needed}")
    if count.value == 0:
        raise NoGpuError(f"the driver shows no GPU; {needed} (CUDA_VISIBLE_DEVICES hides GPUs)")
    return count.value


def counted(count: Count, status: int) -> Count:
    """A runner that failed without a failed test (it did not build, it crashed) counts as one."""
    return count + Count(failed=1) if status != 0 and count.failed == 0 else count


def count_of_suites(report: Path) -> Count:
    """What pytest wrote into its report, where there is one."""
    count = Count()
    if report.is_file():
        for suite in ET.parse(report).getroot().iter("testsuite"):
            total, errors, failures, skipped = (
                int(suite.get(key, "0")) for key in ("tests", "errors", "failures", "skipped")
            )
            failed = errors + failures
            count += Count(total - failed - skipped, failed, skipped)
    return count
