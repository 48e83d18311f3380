"""The scripts of `make gpu-test` and `make gpu-four`, over programs that say what a test wants:
what is counted, what is skipped and why, what ends by its limit. No GPU.

Planted and seen to fail: a program that crashes without a failed case counted as nothing, a limit
that is not kept, and a refusal of `lowlat bench` taken for a failure.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = "no libcuda.so.1 here; needed an NVIDIA GPU and its driver"
# A script with the number of GPUs and the limit of a program that the test wants.
START = """
import sys
sys.path[:0] = [{folders}]
import {name}
{name}.visible_gpus = lambda: {gpus}
{more}
sys.argv = ["{name}.py", *{words}]
sys.exit({name}.main())
"""


def program(folder: Path, name: str, *lines: str) -> None:
    path = folder / name
    path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    path.chmod(0o755)


def ran(name: str, gpus: int, words: list[str], more: str = "") -> tuple[int, list[str]]:
    folders = ", ".join(repr(str(ROOT / "tests" / room)) for room in ("gpu", "tools"))
    script = START.format(folders=folders, name=name, gpus=gpus, words=words, more=more)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return ["--programs", str(tmp_path), "--logs", str(tmp_path / "logs"), "--sanitizer", "not"]


def test_counts_of_all_programs_are_added_and_skips_have_their_reasons(tmp_path, words) -> None:
    program(
        tmp_path,
        "gpu_devices",
        "echo 'skipped far: one device'",
        "echo '2 passed, 0 failed, 1 skipped'",
    )
    program(
        tmp_path,
        "gpu_draft",
        "echo 'skipped two_gpus: 1 GPU(s)'",
        "echo '0 passed, 0 failed, 1 skipped'",
        "exit 77",
    )
    status, lines = ran("run", 1, [*words, "--only", "gpu_devices,gpu_draft,gpu_moe"])
    assert status == 0
    assert lines[-1] == "2 passed, 0 failed, 3 skipped"
    assert "  skipped  gpu_devices far: one device" in lines
    assert "  skipped  gpu_draft two_gpus: 1 GPU(s)" in lines
    assert f"  skipped  gpu_moe: not in {tmp_path}" in lines


def test_a_program_that_fails_crashes_or_hangs_is_a_failure(tmp_path, words) -> None:
    program(
        tmp_path,
        "gpu_devices",
        "echo 'FAILED one (1 checks)'",
        "echo '3 passed, 1 failed, 0 skipped'",
        "exit 1",
    )
    program(tmp_path, "gpu_draft", "kill -SEGV $$")
    program(tmp_path, "gpu_index", "echo begins", "sleep 60")
    only = ["--only", "gpu_devices:far,gpu_draft,gpu_index"]
    status, lines = ran("run", 1, [*words, *only], "run.PROGRAM_LIMIT_S = 1")
    assert status == 1
    assert lines[-1] == "3 passed, 3 failed, 0 skipped"
    assert "FAILED one (1 checks)" in lines
    assert "gpu_index: no end within 1 s" in lines
    assert (tmp_path / "logs" / "gpu_index.log").read_text() == "begins\n"


def package(folder: Path, *lines: str) -> None:
    """A lowlat that does what the lines say with `words`, those of its command line."""
    lowlat = folder / "site" / "lowlat"
    lowlat.mkdir(parents=True)
    (lowlat / "__init__.py").write_text("")
    begin = ("import json, sys", "from pathlib import Path", "words = sys.argv[1:]")
    (lowlat / "__main__.py").write_text("\n".join((*begin, *lines)) + "\n")


WRITES_A_FIGURE = """
if words[1] == 'layer' and '--json' in words:
    tp, gpus = (int(words[words.index(name) + 1]) for name in ('--tp', '--gpus'))
    times = {'median': 150.0, 'low': 149.0, 'high': 151.0}
    figure = {'name': 'layer', 'model': 'v41', 'tp': tp, 'gpus': gpus, 'rows': 6, **times}
    Path(words[words.index('--json') + 1]).write_text(json.dumps({'figures': [figure]}))
    sys.exit(0)
"""
REFUSES = "print('lowlat: not built for this', file=sys.stderr); sys.exit(1)"


def ranks_ran(folder: Path, ranks: int, gpus: int) -> tuple[int, list[str], dict[str, str], str]:
    """Status, lines, the verdict by step and the page."""
    out = folder / "out"
    words = ["--ranks", str(ranks), "--programs", str(folder), "--out", str(out)]
    status, lines = ran("ranks", gpus, words)
    steps = json.loads((out / "figures.json").read_text())["steps"]
    verdicts = {step["name"]: step["verdict"] for step in steps}
    assert len(verdicts) == len(steps)
    return status, lines, verdicts, (out / "table.md").read_text()


def test_ranks_without_their_gpus_are_not_run_and_that_is_no_failure(tmp_path) -> None:
    program(
        tmp_path,
        "gpu_model",
        '[ "$1" = four_ranks_on_one ] && echo "1 passed, 0 failed, 0 skipped"',
    )
    package(tmp_path, WRITES_A_FIGURE, REFUSES)
    status, lines, verdicts, page = ranks_ran(tmp_path, ranks=4, gpus=1)
    assert status == 0
    passed = [name for name, verdict in verdicts.items() if verdict == "passed"]
    alone = "a rank that is its own peers"
    layers = [f"bench layer{of}, {alone}" for of in ("", " of v4", " by one kernel a step")]
    assert passed == ["tiny models, as streams", *layers]
    assert lines[-1] == f"4 passed, 0 failed, {len(verdicts) - 4} skipped"
    assert "| tiny models, as streams | passed |" in page
    assert "| layer v41 TP4, looped back | 6 | 150.00 | 149.00, 151.00 |" in page
    # All that needs more is named: with four GPUs the same steps would run.
    assert "* layers of all ranks (`gpu_layer four_ranks`): 4 GPUs needed, 1 here" in page
    shown = "lowlat bench exchange --tp 4 --gpus 4 --repeats 30 --rows 12,48"
    assert f"* bench exchange (`{shown}`): 4 GPUs needed, 1 here" in page
    with_four = set(ranks_ran(tmp_path, ranks=4, gpus=4)[2])
    assert with_four == {name for name in verdicts if not name.endswith((alone, "as streams"))}


def test_figures_refusals_and_failures_of_ranks_are_told_apart(tmp_path) -> None:
    package(
        tmp_path, WRITES_A_FIGURE, "if words[1] == 'draft':\n    sys.exit('WRONG tokens')", REFUSES
    )
    program(tmp_path, "gpu_layer", "echo '0 passed, 0 failed, 0 skipped'", "exit 1")
    status, _, verdicts, page = ranks_ran(tmp_path, ranks=2, gpus=2)
    assert status == 1
    assert verdicts["layers of all ranks"] == "not run"
    assert verdicts["bench layer"] == "passed"
    assert verdicts["bench exchange"] == "not run"
    assert verdicts["bench draft"] == "FAILED"
    assert "| layer v41 TP2 | 6 | 150.00 | 149.00, 151.00 |" in page
    shown = "lowlat bench exchange --tp 2 --gpus 2 --repeats 30 --rows 12,48"
    assert f"* bench exchange (`{shown}`)" in page


def test_without_the_package_its_benches_are_not_run(tmp_path) -> None:
    package(tmp_path, "sys.exit('python: No module named lowlat')")
    program(tmp_path, "gpu_devices", "echo '1 passed, 0 failed, 0 skipped'")
    status, _, verdicts, page = ranks_ran(tmp_path, ranks=2, gpus=2)
    assert (status, verdicts["bench layer"]) == (0, "not run")
    assert ": this Python has no lowlat" in page


def test_a_machine_without_a_gpu_is_told_what_is_missing() -> None:
    more = f"def none():\n    raise run.NoGpuError({NO_GPU!r})\nrun.visible_gpus = none"
    status, lines = ran("run", 0, [], more)
    assert (status, lines) == (1, [f"GPU tests cannot run here: {NO_GPU}"])


@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("run", [], "GPU tests cannot run"),
        ("ranks", ["--ranks", "2"], "ranks cannot run"),
        ("pack", ["--to", "nowhere"], "nothing can be packed"),
    ],
)
def test_a_build_without_cuda_is_one_line(
    tmp_path: Path, name: str, words: list[str], line: str
) -> None:
    """An empty folder has no such targets, and neither has a build that found no nvcc."""
    where = ["--logs", str(tmp_path)] if name == "run" else []
    where = ["--out", str(tmp_path)] if name == "ranks" else where
    status, lines = ran(name, 1, ["--build-dir", str(tmp_path), *words, *where])
    assert status == 1
    assert lines[-1] == f"{line} here: the programs did not build (nvcc: lowlat doctor)"
