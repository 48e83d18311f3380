"""lowlat._kernels: the border between numpy and the kernels' C ABI.

A fake kernel library stands in for the real one where its answer must be known (the loader takes
LD_LIBRARY_PATH before the module's own run path); the rest asks the library that is installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "cpp_kernels" / "include" / "lowlat" / "kernels.h"
BUDGET_S = 120

kernels = pytest.importorskip("lowlat._kernels", reason="lowlat is not built (make build)")


def fake_library(folder: Path, *flags: str) -> Path:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    command = [compiler, "-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags]
    command += ["-I", str(HEADER.parents[1]), str(ROOT / "tests" / "fakes" / "kernels.c")]
    command += ["-o", str(folder / "liblowlat_kernels.so")]
    subprocess.run(command, check=True, timeout=BUDGET_S)
    return folder


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_library(tmp_path_factory.mktemp("fake"))


def with_fake(folder: Path, code: str) -> subprocess.CompletedProcess:
    """Runs `code` in a Python of its own, after `import numpy as np` and the module as `k`."""
    return subprocess.run(
        [sys.executable, "-c", f"import numpy as np\nfrom lowlat import _kernels as k\n{code}"],
        env=dict(os.environ, LD_LIBRARY_PATH=str(folder)),
        capture_output=True,
        text=True,
        timeout=BUDGET_S,
        check=False,
    )


def answer(folder: Path, code: str) -> object:
    done = with_fake(folder, f"import json\n{code}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refusal(folder: Path, op: str, inputs: str) -> list:
    """[type, words] of the exception that the call raises."""
    return answer(
        folder,
        f"try:\n    k.run_op({op!r}, 'v41', 'scalar', {inputs})\n"
        "except Exception as error:\n    print(json.dumps([type(error).__name__, str(error)]))",
    )


def test_an_output_that_is_not_written_shows(fake: Path) -> None:
    out = answer(
        fake,
        "out = k.run_op('scale', 'v41', 'scalar', {'x': np.arange(1, 4, dtype=np.float32)})\n"
        "bits = {name: array.view(np.uint8).tolist() for name, array in out.items()}\n"
        "print(json.dumps([{n: str(a.dtype) for n, a in out.items()}, bits]))",
    )
    assert out[0] == {"f32": "float32", "bf16": "uint16", "u8": "uint8", "i64": "int64"}
    bits = {name: bytes(held) for name, held in out[1].items()}
    floats = np.frombuffer(bits["f32"], np.float32)
    assert floats[:2].tolist() == [2, 4] and np.isnan(floats[2])
    bf16 = np.frombuffer(bits["bf16"], np.uint16)
    assert bf16[:2].tolist() == [2, 4]
    assert np.isnan((bf16[2:].astype(np.uint32) << 16).view(np.float32)).all()
    assert bits["u8"] == bytes([2, 4, 0xAA])
    assert bits["i64"][16:] == b"\xaa" * 8


@pytest.mark.parametrize(
    "x",
    [
        "np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))",
        "np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2] / 2",
        "np.arange(6, dtype=np.float32)[::-1].reshape(2, 3)[::-1, ::-1]",
    ],
)
def test_any_strides_are_taken(fake: Path, x: str) -> None:
    seen = answer(
        fake,
        f"x = {x}\nout = k.run_op('scale', 'v41', 'scalar', {{'x': x}})['f32']\n"
        "print(json.dumps([out.shape, out.ravel()[:-1].tolist(), (2 * x).ravel()[:-1].tolist()]))",
    )
    assert seen[0] == [2, 3] and seen[1] == seen[2]


def test_empty_and_0d_arrays_keep_their_shape(fake: Path) -> None:
    shapes = answer(
        fake,
        "f = lambda x: k.run_op('scale', 'v41', 'scalar', {'x': x})['f32'].shape\n"
        "print(json.dumps([f(np.zeros((2, 0), np.float32)), f(np.array(1, np.float32))]))",
    )
    assert shapes == [[2, 0], []]


@pytest.mark.parametrize(
    ("op", "inputs", "kind", "words"),
    [
        ("scale", "{}", "ValueError", "needed one array x of f32"),
        ("decline", "{}", "ValueError", "not built"),
        ("fault", "{'x': np.ones(2, np.float32)}", "RuntimeError", "a wait expired"),
        ("scale", "{'x': np.ones(2)}", "ValueError", "x is float64"),
        ("scale", "{'x': np.ones(2, '>f4')}", "ValueError", "x is >f4"),
        ("scale", "{'x': np.array(['a'])}", "ValueError", "x is <U1"),
        ("scale", "{'x': np.array([None])}", "ValueError", "x is object"),
        ("scale", "{'x': [1.0]}", "ValueError", "x is not a numpy array"),
        ("scale", "{'x': np.ones((1,) * 7, np.float32)}", "ValueError", "at most 6"),
        ("scale", "{1: np.ones(2, np.float32)}", "ValueError", "name"),
    ],
)
def test_refusals(fake: Path, op: str, inputs: str, kind: str, words: str) -> None:
    seen = refusal(fake, op, inputs)
    assert seen[0] == kind and words in seen[1]


def test_why_no_model_is_made_on_a_platform(fake: Path) -> None:
    code = "print([k.model_refusal(name) for name in ('absent', 'present')])"
    done = with_fake(fake, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['no model on absent', '']"


def test_the_library_makes_models_on_scalar_and_says_why_not_elsewhere() -> None:
    assert kernels.model_refusal("scalar") == ""
    assert "nvidia" in kernels.model_refusal("nvidia")


def test_a_library_of_another_version_is_refused_at_import(tmp_path: Path) -> None:
    done = with_fake(fake_library(tmp_path, "-DFAKE_ABI_VERSION=99"), "print('loaded')")
    assert done.returncode != 0 and "loaded" not in done.stdout
    assert "ABI version 99" in done.stderr


def test_version_is_the_headers() -> None:
    version = re.search(r"define LOWLAT_KERNELS_ABI_VERSION (\d+)u", HEADER.read_text())
    assert version and kernels.abi_version() == int(version[1])


def test_the_list_has_the_form_that_the_command_reads() -> None:
    ops = json.loads(kernels.op_list())
    assert len(ops) >= 20
    for op in ops:
        assert set(op) == {"name", "models", "about", "in", "out", "numerics"}, op["name"]
        assert op["in"] and op["out"], op["name"]
        assert op["models"] in ("v4", "v41", "v4 v41"), op["name"]
        for argument in (*op["in"], *op["out"]):
            assert argument["name"] and argument["about"], op["name"]
            assert argument["dtype"] in ("f32", "bf16", "e4m3", "ue8m0", "fp4", "u8", "i32", "i64")
        outputs = {argument["name"] for argument in op["out"]}
        assert set(op["numerics"]["scalar"]) == outputs, op["name"]


def test_nothing_else_is_exported() -> None:
    assert {name for name in dir(kernels) if not name.startswith("_")} == {
        "HostedModel",
        "Watch",
        "abi_version",
        "model_refusal",
        "op_list",
        "run_op",
    }


# ------------------------------------------------------------------ hosted models

HOSTING = {"expert_layout": "row_major", "bf16_wo_a": 0, "proposals": 0, "stages": 0}
ADDED = {
    "tp_rank": 0,
    "tp_size": 1,
    "widths": [6, 12],
    "max_batch": 2,
    "max_rows": 12,
    "page_size": 64,
    "num_pages": 8,
    "wait_budget_ns": 1_000_000_000,
}


def hosted_config(**changes: object) -> dict:
    dispatch = pytest.importorskip("lowlat._dispatch", reason="lowlat is not built (make build)")
    facts = json.loads(dispatch.kernel_config(dispatch.built_in("tiny-v41")))
    return facts | ADDED | changes


@pytest.mark.parametrize(
    ("changes", "hosting", "words"),
    [
        ({"hidden": "wide"}, {}, "config.hidden is 'wide', of another type"),
        ({"more": 1}, {}, "fields; needed"),
        ({"widths": list(range(1, 40))}, {}, "config.widths has 39 values; needed at most 32"),
        ({"layers": [{"ratio": 0}]}, {}, "config.layers[..] has no kv_source"),
        ({"tp_size": 3}, {}, "tp_size"),
        ({}, {"expert_layout": "columns"}, 'expert_layout is "columns"'),
        ({}, {"bf16_wo_a": 2}, "bf16_wo_a is 2; needed 0 or 1"),
    ],
)
def test_a_hosted_model_is_refused_by_the_field(changes, hosting, words) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as told:
        kernels.HostedModel("scalar", hosted_config(**changes), HOSTING | hosting)
    assert all(line.strip() for line in str(told.value).splitlines())


def test_a_hosted_model_says_what_it_is_missing() -> None:
    config = hosted_config()
    del config["kind"]
    with pytest.raises(ValueError, match="config has no kind"):
        kernels.HostedModel("scalar", config, HOSTING)
    model = kernels.HostedModel("scalar", hosted_config(), HOSTING)
    names = {spec["name"]: spec for spec in model.tensors()}
    assert "head.weight" not in names and names["kv.swa.0"]["shape"][0] == 0
    assert names["kv.state.2"] == {
        "name": "kv.state.2",
        "dtype": "f32",
        "layout": "row_major",
        "pool": True,
        "shape": [0, 1024],
        "shard_dim": -1,
    }
    with pytest.raises(ValueError, match="is a pool; it comes by lowlat_pools_bind"):
        model.bind("kv.swa.0", (64, [1, 1], "u8"))
    with pytest.raises(ValueError, match=r"tensor embed\.weight is not bound"):
        model.ready()
    with pytest.raises(ValueError, match="a peer's handle has 3 bytes; needed 128"):
        model.peer_import(1, b"abc")


def test_a_model_for_proposals_has_the_drafts_head_alone() -> None:
    model = kernels.HostedModel("scalar", hosted_config(), HOSTING | {"proposals": 1})
    assert [spec["name"] for spec in model.tensors()] == [
        "head.weight",
        "mtp.2.norm.weight",
        "mtp.2.markov_head.embed.weight",
        "mtp.2.markov_head.head.weight",
    ]


def test_a_library_without_hosted_models_is_a_refusal(fake: Path) -> None:
    config = hosted_config()
    told = answer(
        fake,
        f"try:\n    k.HostedModel('scalar', {config!r}, {HOSTING!r})\n"
        "except Exception as error:\n    print(json.dumps([type(error).__name__, str(error)]))",
    )
    assert told == ["ValueError", "the fake hosts no model"]
