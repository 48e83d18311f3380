"""How a server ends by a fault of the kernels: SGLang's own handler, and our watch. (Proved by a
watch that kills nobody.)
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lowlat import build
from sglang.srt import runtime_context

LAUNCHER = Path(__file__).with_name("launcher.py")
BUDGET_S = 120


def test_a_fault_ends_the_server_without_its_diagnostics(tmp_path) -> None:
    """Which take 5 s at least, and where a scheduler still answers more than a minute."""
    done = subprocess.run(
        [sys.executable, str(LAUNCHER), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=BUDGET_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "SIGQUIT received" in done.stderr
    assert "No live scheduler processes found" not in done.stderr
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("folder", "is_patient"), [(None, False), ("", False), ("dumps", True)])
def test_only_a_server_that_dumps_crashes_gets_its_time(folder, is_patient, monkeypatch) -> None:
    seen = SimpleNamespace(crash_dump_folder=folder)
    monkeypatch.setattr(runtime_context, "get_observability", lambda: seen)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(build.config, "published", lambda _: "{}")
    context, where = SimpleNamespace(deadline_s=60.0), SimpleNamespace(tp_rank=0, tp_size=1)
    made = build.Build(torch.nn.Module(), None, context, "draft", 5, (5,), [], where)
    assert made.request().dumps_crashes is is_patient
