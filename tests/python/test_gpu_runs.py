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


def test_ranks_without_their_gpus_are_not_run_and_that_is_no_failure(tmp_path) -> None:
    program(
        tmp_path,
        "gpu_model",
        '[ "$1" = four_ranks_on_one ] && echo "1 passed, 0 failed, 0 skipped"',
    )
    words = ["--ranks", "4", "--programs", str(tmp_path), "--out", str(tmp_path / "out")]
    status, lines = ran("ranks", 1, words)
    assert status == 0
    assert lines[-1] == "1 passed, 0 failed, 8 skipped"
    page = (tmp_path / "out" / "table.md").read_text()
    assert "| tiny models, as streams | passed |" in page
    assert "* layers of all ranks (`gpu_layer four_ranks`): 4 GPUs needed, 1 here" in page


def test_figures_refusals_and_failures_of_ranks_are_told_apart(tmp_path) -> None:
    lowlat = tmp_path / "site" / "lowlat"
    lowlat.mkdir(parents=True)
    figure = {
        "name": "layer",
        "model": "v41",
        "tp": 2,
        "rows": 6,
        "median": 150.0,
        "low": 149.0,
        "high": 151.0,
    }
    (lowlat / "__init__.py").write_text("")
    (lowlat / "__main__.py").write_text(
        "import json, sys\nfrom pathlib import Path\nwords = sys.argv[1:]\n"
        f"report = {{'figures': [{figure!r}]}}\n"
        "if words[1] == 'layer' and '--json' in words:\n"
        "    Path(words[words.index('--json') + 1]).write_text(json.dumps(report))\n"
        "    sys.exit(0)\n"
        "if words[1] == 'draft':\n    sys.exit('WRONG tokens')\n"
        "print('lowlat: not built for --tp 2', file=sys.stderr)\nsys.exit(1)\n"
    )
    program(tmp_path, "gpu_layer", "echo '0 passed, 0 failed, 0 skipped'", "exit 1")
    words = ["--ranks", "2", "--programs", str(tmp_path), "--out", str(tmp_path / "out")]
    status, _ = ran("ranks", 2, words)
    assert status == 1
    verdicts = {
        step["name"]: step["verdict"]
        for step in json.loads((tmp_path / "out" / "figures.json").read_text())["steps"]
    }
    assert verdicts["layers of all ranks"] == "not run"
    assert verdicts["bench layer"] == "passed"
    assert verdicts["bench exchange"] == "not run"
    assert verdicts["bench draft"] == "FAILED"
    page = (tmp_path / "out" / "table.md").read_text()
    assert "| layer v41 TP2 | 6 | 150.00 | 149.00, 151.00 |" in page
    shown = "lowlat bench exchange --tp 2 --gpus 2 --repeats 30 --rows 12,48"
    assert f"* bench exchange (`{shown}`)" in page


def test_a_machine_without_a_gpu_is_told_what_is_missing() -> None:
    more = f"def none():\n    raise run.NoGpuError({NO_GPU!r})\nrun.visible_gpus = none"
    status, lines = ran("run", 0, [], more)
    assert (status, lines) == (1, [f"GPU tests cannot run here: {NO_GPU}"])
