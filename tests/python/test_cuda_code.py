"""Every CUDA file assembles for every part, with the instructions that it is written for.

No GPU is needed. sm_100a and sm_103a are assembled and have never run.
"""

import concurrent.futures
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.cuda_tools import COMPILER, CudaTools, NoToolsError, tools

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("90a", "100a", "103a")
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for room in ("cpp_kernels", "tests/gpu")
    for path in (ROOT / room).rglob("*.cu")
)
# Built with clock stamps, by which their kernels have one more field (LowlatTests.cmake).
STAMPED = ("cpp_kernels/bench/resident_stages.cu",)
ASSEMBLE_BUDGET_S = 240
Cubins = dict[tuple[str, str], Path]  # by source and architecture
# A file, and what its machine code must hold: bulk copies, barriers in shared memory, programmatic
# launch, tensor products and what feeds them, 16-byte accesses with the system's scope.
EVERYWHERE = (
    r"UBLKCP",
    r"UBLKPF",
    r"SYNCS\.ARRIVE",
    r"SYNCS\.PHASECHK\.\S*TRYWAIT",
    r"ACQBULK",
    r"PREEXIT",
    r"HMMA\.16816\.F32\.BF16",
    r"LDSM\.16\.M88\.4",
    r"LDSM\.16\.MT88\.4",
    r"LDG\.E\.128\.STRONG\.SYS",
    r"STG\.E\.128\.STRONG\.SYS",
    r"NANOSLEEP",
)
PLATFORM = "tests/gpu/test_platform.cu"
# The flags of the build, without those of its host compiler.
FLAGS = [
    word
    for word in re.search(
        r"set\(_flags (-std=c\+\+20.*?)\)",
        (ROOT / "cpp_kernels/cmake/LowlatCuda.cmake").read_text(encoding="utf-8"),
        re.DOTALL,
    )[1].split()
    if not word.startswith("-Xcompiler")
]
CONTRACTS = "__global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; }\n"


@pytest.fixture(scope="module")
def cuda() -> CudaTools:
    try:
        return tools()
    except NoToolsError as error:
        pytest.skip(str(error))


def assembled(cuda: CudaTools, source: str, architecture: str, folder: Path) -> Path:
    """The machine code of one file."""
    cubin = folder / f"{source.replace('/', '_')}.{architecture}.cubin"
    root = Path(cuda.nvcc).resolve().parents[1]
    command = [
        cuda.nvcc,
        *("-cubin", "-o", str(cubin), source),
        *(*FLAGS, "-O3", "-DLOWLAT_HAVE_CUDA=1"),
        f'-DLOWLAT_CUDA_ARCHS="sm_{architecture}"',
        *(["-DLOWLAT_STAMPS=1"] if source in STAMPED else []),
        *("-Icpp_kernels/include", "-Icpp_kernels", "-Itests/cpp", "-Itests/gpu", "-I."),
        f"-I{root}/include",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=ASSEMBLE_BUDGET_S, check=False
    )
    assert done.returncode == 0, f"{source}, sm_{architecture}:\n{done.stderr}"
    return cubin


def machine_code(cuda: CudaTools, cubin: Path) -> str:
    return subprocess.run(
        [cuda.nvdisasm, str(cubin)], capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.fixture(scope="module")
def cubins(cuda: CudaTools, tmp_path_factory: pytest.TempPathFactory) -> Cubins:
    folder = tmp_path_factory.mktemp("cubins")
    wanted = [(source, architecture) for source in SOURCES for architecture in ARCHITECTURES]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda one: assembled(cuda, *one, folder), wanted)
        return dict(zip(wanted, made, strict=True))


def test_every_file_assembles_for_every_part(cubins: Cubins) -> None:
    assert len(cubins) == len(SOURCES) * len(ARCHITECTURES)
    assert all(cubin.stat().st_size > 0 for cubin in cubins.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_platforms_instructions_are_there(
    cuda: CudaTools, cubins: Cubins, architecture: str
) -> None:
    code = machine_code(cuda, cubins[PLATFORM, architecture])
    missing = [pattern for pattern in EVERYWHERE if not re.search(pattern, code)]
    assert not missing, f"sm_{architecture}: {missing}"
    # wgmma is sm_90a's alone.
    assert ("HGMMA" in code) == (architecture == "90a")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_and_sums_round_each(cuda: CudaTools, tmp_path: Path, architecture: str) -> None:
    source = tmp_path / "contracts.cu"
    source.write_text(CONTRACTS)
    code = machine_code(cuda, assembled(cuda, str(source), architecture, tmp_path))
    assert re.search(r"\bFMUL\b", code) and re.search(r"\bFADD\b", code)
    assert not re.search(r"\bFFMA\b", code)


def test_the_build_fetches_the_compiler_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (fetch,) = (
        one
        for one in project["tool"]["scikit-build"]["overrides"]
        if "LOWLAT_PIP_CUDA" in one.get("if", {}).get("env", {})
    )
    assert sorted(fetch["build"]["requires"]) == sorted(COMPILER)
