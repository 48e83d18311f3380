"""How a server ends by a fault of the kernels: SGLang's own handler, and our watch. (Proved by a
watch that kills nobody.)
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
