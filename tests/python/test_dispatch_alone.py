"""The wheel lowlat_dispatch alone: built from rust_dispatch/py, installed into an environment that
has nothing else, used by an engine with kernels of its own."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 900

if importlib.util.find_spec("maturin") is None:
    pytest.skip("maturin is not installed (make setup)", allow_module_level=True)

ENGINE = """
import importlib.util, json, time
import lowlat_dispatch as dispatch

assert importlib.util.find_spec("lowlat") is None
assert importlib.util.find_spec("numpy") is None
needs = {"name": "mine", "isas": ["cpu"], "tp_sizes": [2]}
try:
    dispatch.Rank.own(needs, {"isa": "cpu", "tp_size": 3}, tp_rank=0)
except ValueError as refused:
    words = str(refused)
ladder = dispatch.DeadlineLadder(
    kernel_ns=10**9, plugin_ns=2 * 10**9, collective_ns=3 * 10**9, engine_ns=4 * 10**9
)
def ballot(tp_rank):
    rank = dispatch.Rank.own(needs, json.dumps({"isa": "cpu", "tp_size": 2}), tp_rank=tp_rank)
    return rank.ballot(
        mode="decode", tokens_per_request=1, widths=[1, 2], shape="mine", numerics="fp32",
        layout="rows", catalogue_digest=7, ladder=ladder,
    )
ballots = [ballot(0), ballot(1)]
dispatcher = ballots[0].agree([one.words() for one in ballots])
record = dispatcher.captured([(1, [("table", 4096, [1, 8], "int32")]), (2, [])])
read = dispatch.GraphRecord.from_json(record.to_json())
watchdog = dispatch.Watchdog(budget_ns=100, max_gap_ns=1000)
idle = watchdog.late_ns(1)
watchdog.arm(10)
print(json.dumps({
    "version": dispatch.__version__, "refused": words,
    "covered": dispatcher.decide("decode", 2, 1, 2),
    "same": read.digest == record.digest and record.differences(read) == [],
    "late": [idle, watchdog.late_ns(50), watchdog.late_ns(117)],
    "names": sorted(dispatch.__all__),
}))
"""


def run(*command: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=BUDGET_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `pip install ./rust_dispatch/py` builds it, with the tools that are here."""
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", out, "rust_dispatch/py")
    (wheel,) = out.iterdir()
    return wheel


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", wheel)
    return python


def test_the_wheel_is_one_for_every_python_and_typed(wheel: Path) -> None:
    assert "-cp310-abi3-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        f"lowlat_dispatch/{name}" for name in ("__init__.py", "_dispatch.pyi", "py.typed")
    } < names


def test_an_engine_uses_it_alone(python: Path) -> None:
    seen = json.loads(run(python, "-I", "-c", ENGINE))
    assert f'\nversion = "{seen["version"]}"\n' in (ROOT / "Cargo.toml").read_text()
    assert seen["refused"] == "[102] tp_size is 3; these kernels need 2 (change: --tp)"
    assert seen["covered"] == [2, None]
    assert seen["same"] is True
    assert seen["late"] == [None, 0, 7]
    assert "Dispatcher" in seen["names"]


def test_the_page_shows_code_that_runs(python: Path) -> None:
    page = (ROOT / "docs/embedding.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    run(python, "-I", "-c", code.replace("engine-py", f"engine-py-{os.getpid()}"))
