"""Watches the kernels' status words, since nothing of ours runs when a graph replays: a fault is
logged at once and the server stopped, as SGLang's own watchdog stops it.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

# Far below the time in which a fault has to become the server's end, and one read of a few words.
INTERVAL_S = 0.02
HEALTHY = 0
STATES = {1: "waited in vain for rank {peer}", 2: "was ended by rank {peer}", 3: "was aborted"}


def words(status: Mapping[str, Any], catalogue: str, rank: int) -> str:
    """The line of a fault: which rank, in which kernel and stage, for whom, at which exchange."""
    kernels = catalogue.splitlines()
    kernel = kernels[status["kernel"]] if status["kernel"] < len(kernels) else "unknown"
    what = STATES.get(status["state"], "is in state {state}").format(**status)
    return (
        f"lowlat: rank {rank} {what} in {status['stage']} of {kernel.split(' ')[0]}, exchange"
        f" {status['epoch']}; its rows are NaN and the server stops"
    )


def stop_server() -> None:
    """SIGQUIT to the process that started this scheduler, which takes the server down."""
    os.kill(os.getppid(), signal.SIGQUIT)


class Watch:
    """A thread that reads `model`'s status until it is stopped or sees a fault."""

    def __init__(self, model: Any, rank: int, on_fault: Callable[[], None] = stop_server) -> None:
        self.model = model
        self.rank = rank
        self.on_fault = on_fault
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, name="lowlat-watch", daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.stopped.wait(INTERVAL_S):
            status = self.model.status()
            if status["state"] != HEALTHY:
                logger.critical(words(status, self.model.catalogue, self.rank))
                self.on_fault()
                return

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()
