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
    written = json.loads(first.to_json())
    assert written.pop("checksum").startswith("0x")
    assert written == record(1, 0x1000) | {"version": 2}
    with pytest.raises(ValueError, match="is damaged"):
        dispatch.GraphRecord.from_json(first.to_json().replace('"slots"', '"slits"'))
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


# ------------------------------------------------------------------ what a plugin asks


def hopper(**more: object) -> dict:
    options = {"isa": "sm_90", "tp_size": 2, "page_size": 256, "moe_runner_backend": "marlin"}
    return options | more


def test_requirements_say_what_check_asks_for() -> None:
    specs = {spec["name"]: spec for spec in json.loads(dispatch.requirements())}
    spec = specs["lowlat_v41_nvidia"]
    assert (spec["model_type"], spec["isas"]) == ("deepseek_v41", ["sm_90"])
    assert spec["features"] == ["speculative_decoding"]
    config = dispatch.built_in("v41-flash")
    assert dispatch.check(config, hopper()) == []
    for setting in spec["server_args"]:
        wrong = {setting["name"]: "other"}
        # Two of them have an option of their own, which counts for more.
        options = hopper(**wrong if setting["name"] in hopper() else {"server_args": wrong})
        (reason,) = dispatch.check(config, options)
        assert reason.startswith(f"[106] {setting['name']} is other; these kernels need ")
    for setting in spec["env"]:
        assert setting["unset_accepted"]
        (reason,) = dispatch.check(config, hopper(env={setting["name"]: "other"}))
        assert reason.startswith(f"[107] {setting['name']} is other; these kernels need ")


def test_every_feature_has_its_way_off() -> None:
    features = dict(dispatch.features())
    config = dispatch.built_in("v41-flash")
    reasons = dispatch.check(config, hopper(features=sorted(features)))
    assert len(reasons) == len(features) - 1  # speculative decoding is accepted
    for name, off in features.items():
        if name != "speculative_decoding":
            words = f"[109] {name.replace('_', ' ')} is in use; these kernels need it off"
            assert f"{words} (change: {off})" in reasons


def test_a_decline_is_a_numbered_line() -> None:
    assert dispatch.decline("engine_version", "x is 1; needed 2") == "[115] x is 1; needed 2"
    assert dispatch.decline("kernels_missing", "w", "do so") == "[116] w (change: do so)"
    with pytest.raises(ValueError, match="nonsense is no reason's name"):
        dispatch.decline("nonsense", "w")


def test_loaded_tensors_are_checked_all_at_once() -> None:
    facts = [("a", "f32", [2, 3], "row_major"), ("c", "bf16", [4], "marlin")]
    needs = [
        ("a", "bf16", [2, 3], "row_major", None),
        ("b", "e4m3", [4], "row_major", None),
        ("c", "bf16", [4], "row_major", "--moe-runner-backend marlin"),
    ]
    assert dispatch.check_loaded(facts, needs) == [
        "[111] dtype of a is f32; these kernels need bf16",
        "[110] b is not loaded; these kernels need e4m3 [4]",
        "[113] layout of c is marlin; these kernels need row_major"
        " (change: --moe-runner-backend marlin)",
    ]


def ladder(kernel_ns: int = 1) -> object:
    return dispatch.DeadlineLadder(
        kernel_ns=kernel_ns, plugin_ns=20, collective_ns=30, engine_ns=40
    )


def ballot(tp_rank: int, **more: object) -> object:
    rank = dispatch.Rank(dispatch.built_in("v41-flash"), hopper(), tp_rank=tp_rank)
    parts = dict(
        mode="target_verify",
        tokens_per_request=6,
        widths=[6, 12, 24],
        shape="v41",
        numerics="n",
        layout="l",
        catalogue_digest=7,
        ladder=ladder(),
    )
    return rank.ballot(**parts | more)


def agree(*ballots: object) -> object:
    return ballots[0].agree([one.words() for one in ballots])


def test_a_rank_that_cannot_serve_has_no_ballot() -> None:
    with pytest.raises(ValueError, match=r"\[106\] page_size is 64") as refused:
        dispatch.Rank(dispatch.built_in("v41-flash"), hopper(page_size=64, tp_size=3), tp_rank=0)
    assert str(refused.value).startswith("[102] tp_size is 3")


def test_ranks_that_agree_decide_step_after_step() -> None:
    dispatcher = agree(ballot(0), ballot(1))
    assert dispatcher.decide("target_verify", 2, 6, 12) == (2, None)
    assert dispatcher.decide("target_verify", 3, 6, 18) == (4, None)
    numbers = {name: number for number, name, _ in dispatch.reasons()}
    for step, name in [
        (("target_verify", 5, 6, 30), "batch_too_large"),
        (("target_verify", 2, 6, 11), "rows_ragged"),
        (("decode", 1, 1, 1), "mode_not_captured"),
        (("extend", 1, 0, 40), "step_is_extend"),
        (("mixed", 1, 0, 40), "step_is_mixed"),
        (("idle", 0, 0, 0), "step_is_idle"),
        (("target_verify", 2, 1, 2), "tokens_per_request"),
    ]:
        assert dispatcher.decide(*step) == (0, numbers[name]), name
    report = json.loads(dispatcher.report())
    assert (report["covered"], report["uncovered"]) == (2, 7)
    assert report["uncovered_by_reason"]["batch_too_large"] == 1
    dispatcher.disarm("seal_changed")
    assert dispatcher.decide("target_verify", 2, 6, 12) == (0, numbers["disarmed"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"widths": [6, 12]}, r"\[301\] rank 1 covers widths \[6, 12\]; rank 0 covers"),
        ({"numerics": "other"}, r"\[302\] rank 1 covers graph keys"),
        ({"catalogue_digest": 8}, r"\[303\] rank 1 has launch geometry"),
        ({"ladder": ladder(2)}, r"\[305\] rank 1 has deadlines of kernel 2 ns"),
    ],
)
def test_ranks_that_differ_are_told_apart(more: dict, words: str) -> None:
    for own in (0, 1):
        ballots = [ballot(0), ballot(1, **more)]
        with pytest.raises(ValueError, match=words):
            ballots[own].agree([one.words() for one in ballots])


def test_one_rank_that_declines_is_a_decline_of_all() -> None:
    own = ballot(0)
    other = dispatch.declining_ballot(tp_rank=1, tp_size=2, reason="tensor_layout")
    with pytest.raises(ValueError, match=r"^\[307\] rank 1 declines, so all do: .*\[113\]"):
        own.agree([own.words(), other])


def test_ballots_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="needed multiples of tokens_per_request, 6"):
        ballot(0, widths=[7])
    with pytest.raises(ValueError, match="mode is idle; needed decode, target_verify or draft"):
        ballot(0, mode="idle")
    with pytest.raises(ValueError, match="a ballot has 1 words"):
        ballot(0).agree([[1]])
    with pytest.raises(ValueError, match="tp_rank is 2; it must be below tp_size, 2"):
        ballot(2)
    with pytest.raises(ValueError, match=r"\[306\]"):  # a rank alone in a group of two
        ballot(0).agree([ballot(0).words()])
