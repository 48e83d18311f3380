"""The golden vectors: intact, small, made again byte for byte, and met by both platforms."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from oracle import MODELS, OPS
from oracle.compare import VALUES, check_bound, check_exact, check_oracle_outputs, measure
from oracle.index import key_values
from oracle.run import PLATFORMS, run

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"
NUMPY = {"u8": "u1", "i32": "<i4", "i64": "<i8", "f32": "<f4", "bf16": "<u2"}
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def case_json(name):
    return json.loads((GOLDEN / name / "case.json").read_text(encoding="utf-8"))


# Every stage, and the operations whose vectors it is in (of both models where both have it).
STAGES = {
    "accept": ["accept"],
    "argmax": ["accept", "markov_draft"],
    "attention": ["sparse_attention"],
    "compress": ["compress"],
    "draft": ["markov_draft"],
    "engram": ["engram_hash", "engram_lookup", "engram_apply"],
    "experts": ["experts"],
    "format": ["kv_pack", "kv_unpack", "index_query", "index_key"],
    "fp4": ["compress", "index_query", "index_key", "experts"],
    "gate": ["gate", "hash_gate"],
    "hc": ["hc_stats", "hc_combine_norm", "hc_post", "hc_head"],
    "index": ["index_query", "index_key", "index_select"],
    "kv": ["kv_pack", "kv_unpack", "sparse_attention"],
    "linear": ["block_linear", "lm_head"],
    "norm": ["rms_norm", "head_norm"],
    "pool": ["compress", "index_key"],
    "rank_sum": ["rank_sum"],
    "rope": ["rope"],
    "select": ["index_select", "candidate_blocks"],
    "sum": ["rms_norm", "block_linear"],
}
# No operation has these in it: waiting and handing over between ranks, where a ring's rows are, the
# noise that markov_draft is given, and products in tiles, which only platforms with such a unit
# take. Their values are held by their own C++ tests and, but for the waits and the tiles, by
# test_whole_model.py; the tiles' by test_amd_stages.py too.
NO_VECTORS = {"exchange", "wait", "pool_state", "philox", "team", "tile"}
RUNS = [(name, model) for name in CASES for model in case_json(name)["models"]]


def load_maker():
    spec = importlib.util.spec_from_file_location(
        "make_golden", ROOT / "tests/tools/make_golden.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = load_maker()


def read(name):
    folder, case = GOLDEN / name, case_json(name)

    def array(entry):
        data = (folder / entry["file"]).read_bytes()
        assert maker.fnv1a64(data) == entry["fnv1a64"], f"{name}/{entry['file']} has another digest"
        return np.frombuffer(data, NUMPY[entry["dtype"]]).reshape(entry["shape"])

    inputs = {entry["name"]: array(entry) for entry in case["inputs"]}
    outputs = {entry["name"]: (array(entry), entry["bounds"]) for entry in case["outputs"]}
    return case["op"], inputs, outputs


def test_every_operation_of_both_models_has_a_case():
    covered = {(case_json(name)["op"], model) for name, model in RUNS}
    assert covered == {(op, model) for model in MODELS for op in OPS[model]}


def test_every_stage_is_in_one():
    stages = {file.stem for file in (ROOT / "cpp_kernels/stages").glob("*.hpp")}
    assert stages == set(STAGES) | NO_VECTORS, "a new stage: which golden vectors is it in?"
    cases = {case_json(name)["op"] for name in CASES}
    assert {op for ops in STAGES.values() for op in ops} == cases


@pytest.mark.parametrize("name, model", RUNS)
def test_the_oracle_agrees(name, model):
    op, inputs, outputs = read(name)
    got = {output: array for output, (array, _) in outputs.items()}
    check_oracle_outputs(op, got, OPS[model][op](inputs))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name, model", RUNS)
def test_platforms_meet_them(name, model, platform):
    op, inputs, outputs = read(name)
    got = run(op, platform, inputs, model)
    assert set(got) == set(outputs)
    for output, (want, bounds) in outputs.items():
        # Another platform than the case's files name meets the tightest of theirs: scalar's.
        bound = bounds.get(platform, bounds["scalar"])
        if platform == "reference":
            check_exact(f"{name}: {output}", got[output], want)
        elif match := VALUES.fullmatch(bound):
            seen = measure("rel_l2", key_values(got[output]), key_values(want))
            assert seen <= float(match[1]), f"{name}: {output}: {seen:.4g}, {bound}"
        else:
            check_bound(f"{name}: {output}", bound, got[output], want)


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
    # The largest is the position bias of V4's ratio 128, whose shape the model fixes.
    assert max(sizes) <= 128 * 512 * 4 and sum(sizes) < 1_500_000
