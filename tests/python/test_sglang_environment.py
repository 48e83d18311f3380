"""SGLang's environments in the cache: those that no run used for long are removed, and no other.
(Proved by looking at no time, and by heeding no lock.)
"""

import fcntl
import importlib.util
import os
import time
from pathlib import Path

import pytest

DAY_S = 24 * 3600


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).resolve().parents[1] / "tools" / "run_sglang.py"
    spec = importlib.util.spec_from_file_location("run_sglang", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(cache, name, days, complete=True):
    folder = cache / name
    (folder / "bin").mkdir(parents=True)
    (cache / f"{name}.lock").touch()
    then = time.time() - days * DAY_S
    if complete:
        (folder / "complete").touch()
        os.utime(folder / "complete", (then, then))
    os.utime(folder, (then, then))
    return folder


def test_only_environments_that_nobody_uses_go(tool, tmp_path) -> None:
    old = environment(tmp_path, "sglang-old", 15)
    torn = environment(tmp_path, "sglang-torn", 30, complete=False)
    stays = [
        environment(tmp_path, "sglang-new", 13),
        environment(tmp_path, "sglang-mine", 40),
        environment(tmp_path, "sglang-held", 40),
        environment(tmp_path, "other-cache", 40),
    ]
    # Used lately, whatever the folder's own time.
    os.utime(stays[0], (0, 0))
    with (tmp_path / "sglang-held.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tool.remove_unused(tmp_path, "sglang-mine", time.time())
    assert not old.exists() and not torn.exists()
    assert not (tmp_path / "sglang-old.lock").exists()
    assert all(folder.is_dir() for folder in stays)


def test_a_run_that_finds_its_environment_marks_it_as_used(tool, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOWLAT_CACHE", str(tmp_path))
    folder = environment(tmp_path, tool.environment_folder().name, 40)
    old = environment(tmp_path, "sglang-old", 40)
    assert tool.environment(existing=True) == folder / "bin" / "python"
    assert time.time() - (folder / "complete").stat().st_mtime < DAY_S
    assert old.is_dir(), "nothing is made, so nothing has to go"
