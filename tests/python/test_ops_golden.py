"""The golden vectors: intact, small, made again byte for byte, and met by both platforms."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from oracle import OPS
from oracle.compare import check_bound, check_exact, check_oracle_outputs
from oracle.run import PLATFORMS, run

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"
NUMPY = {"u8": "u1", "i32": "<i4", "i64": "<i8", "f32": "<f4", "bf16": "<u2"}
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def load_maker():
    spec = importlib.util.spec_from_file_location(
        "make_golden", ROOT / "tests/tools/make_golden.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = load_maker()


def read(op):
    folder = GOLDEN / op
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))

    def array(entry):
        data = (folder / entry["file"]).read_bytes()
        assert maker.fnv1a64(data) == entry["fnv1a64"], f"{op}/{entry['file']} has another digest"
        return np.frombuffer(data, NUMPY[entry["dtype"]]).reshape(entry["shape"])

    inputs = {entry["name"]: array(entry) for entry in case["inputs"]}
    outputs = {entry["name"]: (array(entry), entry["bounds"]) for entry in case["outputs"]}
    return inputs, outputs


def test_every_operation_has_a_case():
    assert set(CASES) == set(OPS)


@pytest.mark.parametrize("op", CASES)
def test_the_oracle_agrees(op):
    inputs, outputs = read(op)
    check_oracle_outputs(op, {name: array for name, (array, _) in outputs.items()}, OPS[op](inputs))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("op", CASES)
def test_platforms_meet_them(op, platform):
    inputs, outputs = read(op)
    got = run(op, platform, inputs)
    assert set(got) == set(outputs)
    for name, (want, bounds) in outputs.items():
        if platform == "reference":
            check_exact(f"{op}: {name}", got[name], want)
        else:
            check_bound(f"{op}: {name}", bounds[platform], got[name], want)


def test_writing_them_again_gives_the_same_bytes(tmp_path):
    again = tmp_path / "golden"
    maker.write_all(again)

    def contents(root):
        files = (f for f in root.rglob("*") if f.is_file())
        return {str(f.relative_to(root)): f.read_bytes() for f in files}

    before, after = contents(GOLDEN), contents(again)
    assert set(before) == set(after)
    stale = [name for name in before if before[name] != after[name]]
    assert not stale, f"stale, run `make golden` and review the change: {stale}"


def test_they_stay_small():
    sizes = [f.stat().st_size for f in GOLDEN.rglob("*") if f.is_file()]
    # The largest is index_key's projection, whose shape the model fixes.
    assert max(sizes) <= 128 * 512 * 2 and sum(sizes) < 1_500_000
