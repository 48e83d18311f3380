"""lowlat.cli.stamps: tables, pictures and traces of a stamps file."""

import itertools
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from lowlat.cli import stamps
from lowlat.cli.outcome import RefusedError

# Two kernels: the first of two blocks, the second waits for it. One stage is passed twice.
SAID: dict[str, Any] = {
    "schema": "lowlat.stamps",
    "schema_version": 1,
    "what": "layer",
    "model": "v41",
    "schedule": "fused",
    "tp": 4,
    "gpus": 1,
    "rows": 6,
    "units": 1,
    "machine": {"gpu": "NVIDIA H200"},
    "plain_us": 50.0,
    "stamped_us": 51.0,
    "launches": ["front <qkv>", "attention"],
    "stages": [
        {"name": "x", "waits": True},
        {"name": "products", "waits": False},
        {"name": "sums", "waits": False},
    ],
    "stamps": [
        [0, 0, 0, 1000, 1500],
        [0, 1, 0, 1500, 3500],
        [0, 0, 1, 1200, 1600],
        [0, 1, 1, 1600, 2600],
        [0, 1, 1, 2700, 3700],
        [1, 0, 0, 1000, 3700],
        [1, 2, 0, 3700, 6000],
    ],
}


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "a.stamps.json"
    path.write_text(json.dumps({**SAID, **changes}))
    return path


def test_parts_are_sums_of_a_block_and_medians_of_blocks(tmp_path: Path) -> None:
    profile = stamps.read(written(tmp_path))
    assert profile.end_us == 5.0
    assert profile.overhead == pytest.approx(0.02)
    seen = [
        (p.launch, p.stage, p.blocks, p.begin_us, p.end_us, round(p.median_us, 3), p.longest_us)
        for p in stamps.parts(profile)
    ]
    assert seen == [
        (0, 0, 2, 0.0, 0.6, 0.45, 0.5),
        (0, 1, 2, 0.5, 2.7, 2.0, 2.0),
        (1, 0, 1, 0.0, 2.7, 2.7, 2.7),
        (1, 2, 1, 2.7, 5.0, 2.3, 2.3),
    ]


def test_the_table_names_the_overhead(tmp_path: Path) -> None:
    lines = list(stamps.table(stamps.read(written(tmp_path))))
    assert lines[0] == "layer v41 fused tp4 T=6 on 1 x NVIDIA H200"
    assert lines[1] == ("stamps cost +2.0 %: 51.00 us a layer with them, 50.00 us without")
    assert lines[3:6] == [
        "front <qkv>",
        "  wait x                        2     0.00     0.60     0.45     0.50",
        "  products                      2     0.50     2.70     2.00     2.00",
    ]


def test_the_picture_has_every_stamp_where_it_belongs(tmp_path: Path) -> None:
    svg = stamps.picture(stamps.read(written(tmp_path)))
    root = ElementTree.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    paths = root.findall(f"{name}path")
    titles = [path.findtext(f"{name}title") for path in paths]
    assert titles == [
        "front <qkv>: waits for x, median 0.45 us of 2 blocks",
        "front <qkv>: products, median 2.00 us of 2 blocks",
        "attention: waits for x, median 2.70 us of 1 blocks",
        "attention: sums, median 2.30 us of 1 blocks",
    ]
    colours = [path.get("fill") for path in paths]
    assert colours[0] == colours[2] == stamps.WAIT_COLOUR
    assert len(set(colours)) == 3
    # x, y, width, height of every rectangle, back in microseconds and blocks.
    scale = (stamps.WIDTH - stamps.LEFT - stamps.RIGHT) / 5.0
    found = []
    for lane, path in zip((0, 0, 1, 1), paths, strict=True):
        top = stamps.TOP + lane * (stamps.LANE + stamps.GAP)
        for x, y, width, height in re.findall(
            r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z", path.get("d")
        ):
            begin = (float(x) - stamps.LEFT) / scale
            block = round((float(y) - top) / float(height))
            found.append((lane, block, round(begin, 1), round(float(width) / scale, 1)))
            assert top <= float(y) and float(y) + float(height) <= top + stamps.LANE + 0.01
    expected = [
        (launch, block, (begin - 1000) / 1000, (end - begin) / 1000)
        for launch, _, block, begin, end in SAID["stamps"]
    ]
    assert sorted(found) == sorted(expected)


def test_the_picture_fetches_and_runs_nothing(tmp_path: Path) -> None:
    svg = stamps.picture(stamps.read(written(tmp_path)))
    links = re.findall(r"https?://[^\"' ]+", svg)
    assert links == ["http://www.w3.org/2000/svg"]
    assert "<script" not in svg and "href" not in svg


def test_the_trace_is_a_process_a_kernel_and_a_thread_a_block(tmp_path: Path) -> None:
    trace = stamps.trace(stamps.read(written(tmp_path)))
    json.dumps(trace, allow_nan=False)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(SAID["stamps"])
    assert slices[1] == {
        "ph": "X", "pid": 0, "tid": 0, "name": "products", "cat": "compute", "ts": 0.5, "dur": 2.0,
    }  # fmt: skip
    assert [(e["name"], e["cat"]) for e in slices if e["pid"] == 1] == [
        ("wait x", "wait"),
        ("sums", "compute"),
    ]
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    }
    assert names == {
        (0, None): "00 front <qkv>",
        (1, None): "01 attention",
        (0, 0): "block 0",
        (0, 1): "block 1",
        (1, 0): "block 0",
    }
    assert trace["otherData"]["stamped_us"] == 51.0


@pytest.mark.parametrize(("end", "step"), [(5.0, 0.5), (61.0, 5.0), (14.0, 1.0), (900.0, 100.0)])
def test_ticks_are_round_and_few(end: float, step: float) -> None:
    assert stamps.tick_step(end) == pytest.approx(step)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": "lowlat.bench"}, "no lowlat.stamps file"),
        ({"schema_version": 2}, "schema_version is 2; 1 is read here"),
        ({"stamps": []}, "it holds no stamp"),
        ({"stamps": [[2, 0, 0, 1, 2]]}, "a launch or stage that is not listed"),
        ({"stamps": [[0, 3, 0, 1, 2]]}, "a launch or stage that is not listed"),
        ({"stamps": [[0, 0, -1, 1, 2]]}, "of no block"),
        ({"stamps": [[0, 0, 0, 3, 2]]}, "ends before it begins"),
        ({"stamps": [[0, 0, 0, 3]]}, "a broken stamps file"),
        ({"stamps": 5}, "a broken stamps file"),
        ({"plain_us": 0}, "must be above 0"),
        ({"machine": {}}, "a broken stamps file"),
        ({"stages": [{"name": "x"}]}, "a broken stamps file"),
    ],
)
def test_a_broken_file_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(RefusedError, match=re.escape(words)) as refusal:
        stamps.read(path)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no such file"):
        stamps.read(tmp_path / "none.json")
    with pytest.raises(RefusedError, match="not a regular file"):
        stamps.read(tmp_path)


RECORDED = Path(__file__).parent / "support" / "recorded.stamps.json"


def test_recorded_stamps_of_a_layer_are_of_one_clock() -> None:
    """Three kernels of a layer, recorded on an H200: what must hold in any such file, whatever the
    times."""
    profile = stamps.read(RECORDED)
    blocks: dict[tuple[int, int], list[stamps.Stamp]] = {}
    for stamp in profile.stamps:
        blocks.setdefault((stamp.launch, stamp.block), []).append(stamp)
    for passed in blocks.values():
        # A block's stages follow each other.
        assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(passed))
    # The query's blocks cannot have their input before the last block of the kernel before wrote
    # its own; clocks that are a microsecond apart would show here.
    by_name = {name: idx for idx, name in enumerate(profile.launches)}
    written = max(s.end_ns for s in profile.stamps if s.launch == by_name["front qkv"])
    had = [
        s.begin_ns
        for s in profile.stamps
        if s.launch == by_name["front q"] and profile.stages[s.stage].name == "read"
    ]
    assert len(had) == 128 and min(had) >= written - 100
    # All of one launch that fits the device begin together.
    begins = [s.begin_ns for s in profile.stamps if s.launch == by_name["front qkv"]]
    assert min(begins) == 0


def test_recorded_stamps_are_drawn() -> None:
    profile = stamps.read(RECORDED)
    lines = list(stamps.table(profile))
    assert lines[1].startswith("stamps cost +1.4 %: ")
    assert [line for line in lines if not line.startswith((" ", "stamps", "layer"))] == [
        "front qkv",
        "front q",
        "statistics",
    ]
    svg = stamps.picture(profile)
    ElementTree.fromstring(svg)
    assert len(re.findall(r"M[\d.]+ [\d.]+h", svg)) == len(profile.stamps)
    assert ">sum<" in svg and ">other<" not in svg
    slices = [e for e in stamps.trace(profile)["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(profile.stamps)
