"""What every operation refuses, made from its own declaration: one line that names the array."""

import numpy as np
import pytest
from oracle import MODELS
from oracle.cases import SHAPES, make
from oracle.run import PLATFORMS, op_list, run

OPS = [(model, op) for model in MODELS for op in SHAPES[model]]
each_operation = pytest.mark.parametrize("model, op", OPS)
FLOAT_WORDS = ("bf16", "f32", "e4m3")


def inputs(model, op, shape=1):
    return make(op, 7, model, **SHAPES[model][op][1][shape])


def declared(model, op):
    return {spec["name"]: spec for spec in op_list(model)[op]["in"]}


def refusal(model, op, arrays, platform="reference"):
    with pytest.raises(ValueError) as caught:
        run(op, platform, arrays, model)
    message = str(caught.value)
    assert message and "\n" not in message, f"not one line: {message!r}"
    return message


def check_refused(model, op, arrays, *words):
    """Refused the same way on both platforms, naming one of `words`."""
    messages = {refusal(model, op, arrays, platform) for platform in PLATFORMS}
    assert len(messages) == 1, messages
    message = messages.pop()
    assert any(word in message for word in words), f"{message!r} names none of {words}"


@each_operation
def test_missing_and_extra_arrays(model, op):
    arrays, specs = inputs(model, op), declared(model, op)
    assert set(arrays) <= set(specs)
    for name in specs:
        if specs[name].get("optional") or name not in arrays:
            continue
        check_refused(model, op, {n: a for n, a in arrays.items() if n != name}, name)
    check_refused(model, op, arrays | {"surplus": np.zeros(3, np.float32)}, "surplus")


@each_operation
def test_other_dtypes(model, op):
    arrays = inputs(model, op)
    for name, array in arrays.items():
        for dtype in (np.uint8, np.int32, np.int64, np.float32, np.uint16):
            if array.dtype != dtype:
                with np.errstate(invalid="ignore"):
                    check_refused(model, op, arrays | {name: np.zeros(array.shape, dtype)}, name)


@each_operation
def test_other_ranks(model, op):
    arrays = inputs(model, op)
    for name, array in arrays.items():
        check_refused(model, op, arrays | {name: array[None]}, name)
        if array.ndim > 1:
            check_refused(model, op, arrays | {name: array[0]}, name)


def bound_elsewhere(model, op, name, axis):
    """Whether another array (or a number) fixes this dimension."""
    specs = declared(model, op)
    word = specs[name]["shape"].split(",")[axis] if isinstance(specs[name]["shape"], str) else None
    if word is None:
        word = str(specs[name]["shape"][axis])
    symbols = "".join(c for c in word if c.isalpha())
    if not symbols:
        return True
    present = inputs(model, op)
    return any(
        symbols in str(other["shape"]) for n, other in specs.items() if n != name and n in present
    )


@each_operation
def test_other_dimensions(model, op):
    arrays = inputs(model, op)
    for name, array in arrays.items():
        for axis in range(array.ndim):
            if not bound_elsewhere(model, op, name, axis):
                continue
            longer = np.concatenate([array, array.take([0], axis)], axis)
            specs = declared(model, op)
            # The message may name the array, or the other one that fixed the symbol first.
            check_refused(
                model, op, arrays | {name: longer}, name, *(n for n in specs if n in arrays)
            )


def poison(array, word, value):
    bad = array.copy().reshape(-1)
    if word == "bf16":
        bits = {"nan": 0x7FC0, "inf": 0x7F80}[value]
        bad[len(bad) // 2] = bits
    elif word == "e4m3":
        bad[len(bad) // 2] = 0x7F
    else:
        bad[len(bad) // 2] = {"nan": np.nan, "inf": np.inf}[value]
    return bad.reshape(array.shape)


@each_operation
def test_nan_in_any_float_input(model, op):
    arrays, specs = inputs(model, op), declared(model, op)
    for name, array in arrays.items():
        if specs[name]["dtype"] in FLOAT_WORDS and array.size:
            check_refused(
                model, op, arrays | {name: poison(array, specs[name]["dtype"], "nan")}, name
            )


def with_value(model, op, name, index, value, shape=1):
    arrays = inputs(model, op, shape)
    changed = arrays[name].copy()
    changed[index] = value
    return arrays | {name: changed}


@pytest.mark.parametrize(
    "op, name, index, value",
    [
        ("block_linear", "block", (), 64),
        ("block_linear", "block", (), 0),
        ("rope", "yarn", (), 2),
        ("rope", "inverse", (), -1),
        ("rope", "pos", 0, -1),
        ("rope", "pos", 0, 1 << 20),
        ("sparse_attention", "swa_idx", (0, 0), 140),
        ("sparse_attention", "swa_idx", (0, 0), -2),
        ("sparse_attention", "extra_idx", (5, 39), 60),
        ("compress", "ratio", (), 0),
        ("index_query", "pos", 0, 1 << 20),
        ("index_select", "count", 0, 78),
        ("index_select", "count", 0, -1),
        ("index_select", "k", (), 0),
        ("gate", "bias", 0, np.inf),
        ("experts", "ids", (0, 0), 17),
        ("experts", "ids", (5, 5), -1),
        ("engram_hash", "token", 0, -1),
        ("engram_hash", "token", 0, 40),
        ("engram_hash", "pos", 0, -1),
        ("engram_hash", "prime", (0, 0), 0),
        ("engram_lookup", "ids", (0, 0), 100),
        ("engram_lookup", "ids", (0, 0), -1),
        ("markov_draft", "anchor", 0, 77),
        ("markov_draft", "anchor", 0, -1),
        ("markov_draft", "temp", 0, -0.5),
        ("markov_draft", "temp", 0, np.inf),
        ("markov_draft", "uniform", (1, 0, 0), 0.0),
        ("markov_draft", "uniform", (1, 0, 0), 1.0),
        ("accept", "draft", (0, 0), 77),
        ("accept", "draft", (0, 0), -1),
        ("accept", "temp", 0, -1.0),
        ("accept", "coins", (0, 0), 1.0),
        ("accept", "coins", (0, 0), -0.25),
    ],
)
def test_values_out_of_range(op, name, index, value):
    for model in MODELS:
        if op in SHAPES[model]:
            check_refused(model, op, with_value(model, op, name, index, value), name)


@pytest.mark.parametrize(
    "model, op, name, index, value",
    [
        ("v41", "compress", "ratio", (), 4),
        ("v41", "compress", "ratio", (), 128),
        ("v4", "compress", "ratio", (), 1),
        ("v4", "compress", "ratio", (), 2),
        ("v4", "compress", "ratio", (), 0),
        ("v4", "compress", "ratio", (), 128),  # with the arrays of ratio 4
        ("v4", "hash_gate", "token", 0, -1),
        ("v4", "hash_gate", "token", 0, 40),
        ("v4", "hash_gate", "table", (0, 0), 17),
        ("v4", "hash_gate", "table", (39, 5), -1),
    ],
)
def test_values_that_one_model_has_not(model, op, name, index, value):
    check_refused(model, op, with_value(model, op, name, index, value), name, "ape", "wkv")


def test_a_draft_of_v4_routes_as_its_target_does():
    arrays = make("gate", 7, "v4", T=6, H=160, E=17, k=3)
    check_refused("v4", "gate", arrays, "k is 3")


def test_shared_experts_in_the_other_models_blocks():
    for model, block in (("v4", 32), ("v41", 128)):
        arrays = make("experts", 7, model, T=2, E=6, H=256, I=128, b=block)
        check_refused(model, "experts", arrays, "shared_w1_scale")


def test_v4_has_no_candidate_blocks():
    arrays = inputs("v4", "index_select")
    for name in ("blocks", "block"):
        check_refused("v4", "index_select", arrays | {name: np.zeros((), np.int64)}, name)


@pytest.mark.parametrize(
    "column, byte",
    [(0, 0x7F), (127, 0xFF), (slice(128, 132), (0, 0, 0x80, 0x7F)), (131, 0x7F), (131, 0xFF)],
)
def test_stored_keys_of_v4_that_are_no_numbers(column, byte):
    arrays = inputs("v4", "index_select")
    arrays["ik"][3, 130] |= 0x80
    arrays["ik"][3, column] = byte
    check_refused("v4", "index_select", arrays, "ik[3")


def test_operations_of_the_other_model():
    """Refused by the operation's and the model's names, before any array is looked at."""
    for model in MODELS:
        for other in set(MODELS) - {model}:
            for op in set(SHAPES[other]) - set(SHAPES[model]):
                message = refusal(model, op, inputs(other, op))
                assert op in message and model in message, message


@each_operation
def test_rows_beyond_the_limits(model, op):
    arrays = inputs(model, op)
    specs = declared(model, op)
    first = next(iter(specs))
    dims = str(specs[first]["shape"])
    if "T" not in dims:
        pytest.skip(f"{op} has no T")

    def rows(name, count):
        axis = [d.strip() for d in shape_words(specs[name])].index("T")
        return np.repeat(arrays[name].take([0], axis), count, axis)

    for count in (0, 65):
        resized = {
            n: rows(n, count) if "T" in shape_words(specs[n]) else a for n, a in arrays.items()
        }
        check_refused(model, op, resized, "T", *arrays)


def shape_words(spec):
    shape = spec["shape"]
    words = shape.split(",") if isinstance(shape, str) else [str(d) for d in shape]
    return [w.strip() for w in words]


def test_unknown_operation_model_and_platform():
    arrays = inputs("v41", "rms_norm")
    from lowlat import _kernels

    for op, model, platform, word in (
        ("rms_norms", "v41", "scalar", "rms_norms"),
        ("rms_norm", "v5", "scalar", "v5"),
        ("rms_norm", "v41", "quantum", "quantum"),
    ):
        with pytest.raises(ValueError, match=word) as caught:
            _kernels.run_op(op, model, platform, arrays)
        assert "\n" not in str(caught.value)
