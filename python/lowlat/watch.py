"""Watches the kernels' status words, since nothing of ours runs when a graph replays: a native
thread writes a post-mortem of a fault at once, logs it, and stops the server as SGLang's own
watchdog stops it, by SIGQUIT to the process that started this scheduler. That one takes its time,
so a moment later both are killed, and every child of its with it, as it would do at last.
"""

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowlat import _dispatch, _kernels, env
from lowlat.surface import SGLANG_VERSION

# For the launcher's own words about its end, and the peers' post-mortems.
GRACE_MS = 50


def path_of(rank: int, mode: str) -> Path:
    """Where this process's post-mortem of one model goes."""
    return env.fault_folder() / f"lowlat-fault-{os.getpid()}-rank{rank}-{mode}.json"


class Watch:
    """Watches `model`, a ``_kernels.HostedModel``, as long as `owner` lives. `facts` go into the
    post-mortem; `stop_pid` is who gets SIGQUIT, this process's parent unless said. With
    `is_patient` nobody is killed afterwards."""

    def __init__(
        self,
        owner: Any,
        model: Any,
        *,
        rank: int,
        facts: Mapping[str, Any],
        stop_pid: int | None = None,
        is_patient: bool = False,
    ) -> None:
        self.facts = {
            "lowlat": _dispatch.version(),
            "sglang": SGLANG_VERSION,
            "catalogue_digest": f"{model.catalogue_digest:016x}",
            **facts,
            "captured": [],
        }
        self.path = path_of(rank, str(facts["mode"]))
        self.native = _kernels.Watch(
            model,
            rank=rank,
            about=json.dumps(self.facts),
            path=str(self.path),
            stop_pid=os.getppid() if stop_pid is None else stop_pid,
            grace_ms=0 if is_patient else GRACE_MS,
        )
        # At the interpreter's end too, before the model goes.
        self.stop = weakref.finalize(owner, self.native.stop)

    def captured(self, key: Mapping[str, Any]) -> None:
        """A graph that was captured: the post-mortem names them all."""
        if key not in self.facts["captured"]:
            self.facts["captured"].append(dict(key))
            self.native.set_about(json.dumps(self.facts))
