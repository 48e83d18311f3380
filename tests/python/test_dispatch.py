"""The dispatcher's Python face: text and numbers cross it whole, and errors are one line."""

import json
import re
from pathlib import Path

import pytest

dispatch = pytest.importorskip("lowlat._dispatch", reason="lowlat._dispatch is not built here")

ROOT = Path(__file__).resolve().parents[2]


def test_reasons_are_those_of_the_c_header() -> None:
    header = (ROOT / "rust_dispatch/capi/include/lowlat/dispatch.h").read_text(encoding="utf-8")
    in_header = re.findall(r"^  LOWLAT_REASON_(\w+) = (\d+),$", header, re.MULTILINE)
    in_python = [(name.upper(), str(number)) for number, name, _ in dispatch.reasons()]
    assert in_python == in_header
    assert all(words and "\n" not in words for _, _, words in dispatch.reasons())


@pytest.mark.parametrize("name", ["tiny-v41", "v41-flash"])
def test_built_in_models_are_served_on_scalar(name: str) -> None:
    assert name in dispatch.built_in_names()
    assert dispatch.check(dispatch.built_in(name), {"tp_size": 2, "isa": "scalar"}) == []


def test_there_is_no_other_built_in_model() -> None:
    assert dispatch.built_in("tiny") is None


def test_check_takes_a_dict_or_json_and_gives_every_reason() -> None:
    config = dispatch.built_in("v41-flash")
    options = {"tp_size": 3, "isa": "sm_90", "page_size": 64, "moe_runner_backend": "marlin"}
    reasons = dispatch.check(config, options)
    assert reasons == dispatch.check(config, json.dumps(options))
    assert reasons[0] == "[102] tp_size is 3; these kernels need 1, 2, 4 or 8 (change: --tp)"
    assert reasons[-1] == (
        "[106] page_size is 64; these kernels need 256 (change: --page-size 256)"
    )
    assert [reason[:5] for reason in reasons] == ["[102]", "[105]", "[105]", "[105]", "[106]"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tpp": 2}, "options: unknown field `tpp`"),
        ({"tp_size": -1}, "options: tp_size: invalid value: integer `-1`, expected u32"),
        ({"features": ["teleport"]}, "options: features: unknown variant `teleport`"),
        ("[", "options: not a JSON object"),
        (5, "options: not a JSON object"),
    ],
)
def test_options_that_cannot_be_read_are_one_line(options: object, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        dispatch.check(dispatch.built_in("tiny-v41"), options)
    assert "\n" not in str(error.value)


def test_a_config_that_cannot_be_read_is_a_reason_and_not_an_error() -> None:
    (reason,) = dispatch.check("{", {})
    assert reason.startswith("[114] ")


def test_a_ladder_is_frozen_and_in_order() -> None:
    ladder = dispatch.DeadlineLadder(kernel_ns=1, plugin_ns=2, collective_ns=3, engine_ns=2**63)
    assert (ladder.kernel_ns, ladder.engine_ns) == (1, 2**63)
    with pytest.raises(AttributeError):
        ladder.kernel_ns = 5
    with pytest.raises(ValueError, match="kernel budget is 2 ns; it must be shorter than"):
        dispatch.DeadlineLadder(kernel_ns=2, plugin_ns=2, collective_ns=3, engine_ns=4)


def record(batch_size: int, address: int) -> dict:
    key = {
        "mode": "target_verify",
        "batch_size": batch_size,
        "tokens_per_request": 6,
        "width": batch_size * 6,
        "shape": "tiny-v41",
        "isa": "scalar",
        "numerics_digest": "0x0000000000000001",
        "layout_digest": "0xffffffffffffffff",
    }
    seal = {"name": "slots", "address": f"0x{address:016x}", "shape": [6], "dtype": "i32"}
    return {"version": 1, "entries": [{"key": key, "path": "persistent", "seals": [seal]}]}


def test_a_graph_record_is_read_written_and_compared() -> None:
    first = dispatch.GraphRecord.from_json(json.dumps(record(1, 0x1000)))
    assert len(first) == 1
    assert json.loads(first.to_json()) == record(1, 0x1000)
    moved = dispatch.GraphRecord.from_json(json.dumps(record(1, 0x2000)))
    assert first.differences(moved) == []
    assert first.digest == moved.digest
    other = dispatch.GraphRecord.from_json(json.dumps(record(2, 0x1000)))
    assert len(first.differences(other)) == 2
    assert first.digest != other.digest
    with pytest.raises(ValueError, match="not a graph record"):
        dispatch.GraphRecord.from_json("{}")
