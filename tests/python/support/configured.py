"""CMake's configuration of the kernels with a compiler that only says what it is."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CONFIGURE_BUDGET_S = 180


def configured(
    tmp_path: Path, options: dict[str, str], variable: str, compiler_says: str
) -> tuple[int, str]:
    """Exit status and words of CMake with these options, where the environment's `variable` names a
    compiler that says `compiler_says`; nothing else is built."""
    cmake = shutil.which("cmake")
    assert cmake is not None, "cmake is not on PATH: make test installs it and says where it is"
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\necho '{compiler_says}'\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    nothing = dict.fromkeys(("LOWLAT_TESTS", "LOWLAT_PYTHON", "LOWLAT_RUST"), "OFF")
    words = [f"-D{name}={value}" for name, value in (nothing | options).items()]
    done = subprocess.run(
        [cmake, "-S", str(ROOT), "-B", str(tmp_path / "build"), *words],
        env=os.environ | {variable: str(compiler)},
        capture_output=True,
        text=True,
        timeout=CONFIGURE_BUDGET_S,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())
