"""Builds the stand-ins of tests/fakes as shared libraries."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def build(folder: Path, source: str, *defines: str) -> Path:
    """A shared library of tests/fakes/`source`; the test is skipped where no C compiler is."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / f"{Path(source).stem}{'_'.join(defines).replace('=', '_')}.so"
    words = [compiler, "-shared", "-fPIC", *(f"-D{define}" for define in defines)]
    headers = ["-I", str(ROOT / "cpp_kernels/include")]
    subprocess.run(
        [*words, *headers, str(ROOT / "tests/fakes" / source), "-o", str(library)],
        check=True,
        timeout=60,
    )
    return library
