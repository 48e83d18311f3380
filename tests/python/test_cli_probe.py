"""lowlat.cli.probe: what foreign libraries say of themselves, asked of stand-ins."""

import json
from pathlib import Path

import pytest
from lowlat.cli import probe
from support import fakes


def answer(capsys: pytest.CaptureFixture, *words: str) -> dict:
    probe.main(list(words))
    return json.loads(capsys.readouterr().out)


def test_a_kernel_library_tells_its_abi(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    library = fakes.build(tmp_path, "kernels.c", "FAKE_ABI_VERSION=7")
    seen = answer(capsys, "kernels", str(library))
    assert seen == {"abi": 7, "ops": 1, "platforms": []}


def test_cuda_devices_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    library = fakes.build(tmp_path, "cuda.c")
    devices = ["Fake 40 (sm_90)", "Fake 41 (sm_90)"]
    assert answer(capsys, "cuda", str(library)) == {"devices": devices}


def test_a_driver_that_says_no_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    library = fakes.build(tmp_path, "cuda.c", "FAKE_CUDA_ERROR=999")
    assert answer(capsys, "cuda", str(library)) == {"error": "cuInit gave error 999"}


@pytest.mark.parametrize("count", [0, 1])
def test_hip_devices_are_named(tmp_path: Path, capsys: pytest.CaptureFixture, count: int) -> None:
    library = fakes.build(tmp_path, "hip.c", f"FAKE_HIP_COUNT={count}")
    devices = [f"gfx950 number {idx}" for idx in range(count)]
    assert answer(capsys, "hip", "libnone.so", str(library)) == {"devices": devices}


def test_what_is_not_there_is_an_error(capsys: pytest.CaptureFixture) -> None:
    assert "cannot open shared object" in answer(capsys, "hip", "libnone.so")["error"]
    assert "No module named" in answer(capsys, "module", "no_such_module")["error"]


def test_a_module_tells_its_versions(capsys: pytest.CaptureFixture) -> None:
    # json.__version__ is a string; json has no `version`, and numpy's is a module.
    assert answer(capsys, "module", "json") == {"__version__": json.__version__}
    assert set(answer(capsys, "module", "numpy")) == {"__version__"}
