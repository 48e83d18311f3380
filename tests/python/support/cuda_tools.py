"""An nvcc and an nvdisasm for tests that assemble kernels without a GPU.

Taken from CUDACXX, PATH, /usr/local/cuda or this interpreter's pip packages; else, where
LOWLAT_CACHE names a folder, fetched by pip into an environment below it, once.
"""

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# All of one CUDA: one left free comes from a newer, and the build stops. pyproject.toml has the
# same five.
COMPILER = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
DISASSEMBLER = "nvidia-cuda-nvdisasm==13.5.37"
FETCH_BUDGET_S = 240


@dataclass(frozen=True)
class CudaTools:
    nvcc: str
    nvdisasm: str


class NoToolsError(Exception):
    """The words say what is missing and what would bring it."""


def beside(nvcc: str | None) -> CudaTools | None:
    if not nvcc or not Path(nvcc).is_file():
        return None
    place = Path(nvcc).resolve().with_name("nvdisasm")
    disassembler = str(place) if place.is_file() else shutil.which("nvdisasm")
    return CudaTools(nvcc, disassembler) if disassembler else None


def of_packages(purelib: Path) -> CudaTools | None:
    found = sorted(map(str, purelib.glob("nvidia/cu1[3-9]/bin/nvcc")), reverse=True)
    return beside(found[0]) if found else None


@functools.cache
def tools() -> CudaTools:
    """Raises NoToolsError."""
    for nvcc in (os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if seen := beside(nvcc):
            return seen
    if seen := of_packages(Path(sysconfig.get_paths()["purelib"])):
        return seen
    cache = os.environ.get("LOWLAT_CACHE")
    if not cache:
        raise NoToolsError("no nvcc here, and no LOWLAT_CACHE to fetch one into")
    return fetched(Path(cache) / "cuda-13.0")


def fetched(folder: Path) -> CudaTools:
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    purelib = folder / "lib" / python / "site-packages"
    done = folder / "complete"
    if not done.is_file():
        try:
            subprocess.run(
                [sys.executable, "-m", "venv", str(folder)],
                check=True,
                capture_output=True,
                timeout=60,
            )
            subprocess.run(
                [str(folder / "bin/pip"), "install", "-q", *COMPILER, DISASSEMBLER],
                check=True,
                capture_output=True,
                timeout=FETCH_BUDGET_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise NoToolsError(f"the CUDA compiler could not be fetched: {error}") from error
        done.touch()
    if seen := of_packages(purelib):
        return seen
    raise NoToolsError(f"{folder} is for another Python; remove it to fetch the compiler anew")
