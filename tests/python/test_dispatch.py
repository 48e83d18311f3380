"""lowlat._dispatch: the border between Python and the dispatcher's decisions."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
dispatch = pytest.importorskip("lowlat._dispatch", reason="lowlat is not built (make build)")


def test_version_is_the_workspaces() -> None:
    assert f'\nversion = "{dispatch.version()}"\n' in (ROOT / "Cargo.toml").read_text()


def test_built_in_models_are_configurations() -> None:
    assert "tiny-v41" in dispatch.built_in_names()
    for name in dispatch.built_in_names():
        assert json.loads(dispatch.built_in(name))
    assert dispatch.built_in("nothing") is None


@pytest.mark.parametrize("name", ["tiny-v4", "v4-flash", "tiny-v41", "v41-flash"])
def test_a_built_in_model_can_be_served(name: str) -> None:
    config = dispatch.built_in(name)
    assert dispatch.check(config, {"isa": "scalar", "tp_size": 2}) == []


def test_options_are_a_dict_or_json() -> None:
    config = dispatch.built_in("tiny-v41")
    options = {"isa": "scalar", "tp_size": 3}
    reasons = dispatch.check(config, options)
    assert reasons and reasons == dispatch.check(config, json.dumps(options))


def test_every_reason_comes_at_once_and_names_what_was_seen() -> None:
    config = dispatch.built_in("v41-flash")
    reasons = dispatch.check(config, {"isa": "sm_90", "tp_size": 3, "page_size": 64})
    assert len(reasons) >= 2
    assert any("64" in reason and "256" in reason for reason in reasons)
    assert all("\n" not in reason for reason in reasons)


def test_the_reasons_are_these_and_in_this_order() -> None:
    config = dispatch.built_in("v41-flash")
    options = {"tp_size": 3, "isa": "sm_90", "page_size": 64, "moe_runner_backend": "marlin"}
    reasons = dispatch.check(config, options)
    assert [reason[:5] for reason in reasons] == ["[102]", "[105]", "[105]", "[105]", "[106]"]
    assert reasons[0] == "[102] tp_size is 3; these kernels need 1, 2, 4 or 8 (change: --tp)"
    assert reasons[-1] == (
        "[106] page_size is 64; these kernels need 256 (change: --page-size 256)"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tpp": 2}, "options: unknown field `tpp`"),
        ({"tp_size": -1}, "options: tp_size: invalid value: integer `-1`, expected u32"),
        ({"features": ["teleport"]}, "options: features: unknown variant `teleport`"),
        (5, "options: not a JSON object"),
    ],
)
def test_an_option_that_cannot_be_read_is_named(options: object, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        dispatch.check(dispatch.built_in("tiny-v41"), options)


@pytest.mark.parametrize("options", ["{", "[]", '{"tpp": 2}', '{"tp_size": "two"}'])
def test_an_option_that_is_none_is_a_value_error(options: str) -> None:
    with pytest.raises(ValueError) as caught:
        dispatch.check(dispatch.built_in("tiny-v41"), options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"hidden_size": -1}'])
def test_a_config_that_is_none_ends_in_words(config: str) -> None:
    try:
        reasons = dispatch.check(config, {"isa": "scalar"})
    except ValueError as error:
        reasons = [str(error)]
    assert reasons and all(reason and "\n" not in reason for reason in reasons)


def test_a_ladder_out_of_order_is_refused() -> None:
    ladder = dispatch.DeadlineLadder(kernel_ns=1, plugin_ns=2, collective_ns=3, engine_ns=4)
    assert (ladder.kernel_ns, ladder.engine_ns) == (1, 4)
    with pytest.raises(ValueError, match="plugin"):
        dispatch.DeadlineLadder(kernel_ns=2, plugin_ns=2, collective_ns=3, engine_ns=4)
    with pytest.raises(AttributeError):
        ladder.kernel_ns = 5


def test_a_record_that_is_none_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        dispatch.GraphRecord.from_json("{")


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


@pytest.mark.parametrize(
    ("name", "experts"),
    # Published: experts of a layer, bytes of one, layers.
    [("v4-flash", 256 * 13.37e6 * 43), ("v41-flash", 384 * 18.80e6 * 40)],
)
def test_the_memory_plan_is_json_and_a_table(name: str, experts: float) -> None:
    config = dispatch.built_in(name)
    text, table = dispatch.memory_plan(config, '{"tp_size": 4, "context": 131072, "requests": 2}')
    plan = json.loads(text)
    assert len(plan["ranks"]) == 4
    assert plan["ranks"][0]["groups"]["experts"] == pytest.approx(experts / 4, rel=0.01)
    assert plan["load"]["requests"] == 2
    assert all(len(line) <= 100 for line in table.splitlines())
    with pytest.raises(ValueError, match=r"tp_size is 3; embed\.weight"):
        dispatch.memory_plan(dispatch.built_in("tiny-v41"), '{"tp_size": 3}')
    with pytest.raises(ValueError, match="model_type and architectures are missing"):
        dispatch.memory_plan("{}", "{}")
