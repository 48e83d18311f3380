"""lowlat._dispatch: the border between Python and the dispatcher's decisions."""

import json
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


def test_a_built_in_model_can_be_served() -> None:
    config = dispatch.built_in("tiny-v41")
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


@pytest.mark.parametrize("options", ["{", "[]", '{"tp": 2}', '{"tp_size": "two"}'])
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


def test_a_record_that_is_none_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        dispatch.GraphRecord.from_json("{")
