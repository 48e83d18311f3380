"""A process that ends as SGLang's launcher does, by that one's own handler of SIGQUIT, and starts a
scheduler whose kernels fault.

    python launcher.py FOLDER
"""

import asyncio
import functools
import logging
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

# Another event loop, which this environment has not and nothing here needs.
sys.modules["uvloop"] = SimpleNamespace(EventLoopPolicy=asyncio.DefaultEventLoopPolicy)

from sglang.srt.managers.tokenizer_manager import SignalHandler, TokenizerManager  # noqa: E402
from support import fault_server  # noqa: E402

BUDGET_S = 60


def main(folder: str) -> None:
    logging.basicConfig(level=logging.INFO)
    manager = SimpleNamespace(
        _subprocess_watchdog=None, crash_dump_folder="", crash_dump_performed=False
    )
    manager.dump_requests_before_crash = functools.partial(
        TokenizerManager.dump_requests_before_crash, manager
    )
    loop = asyncio.new_event_loop()
    # As TokenizerManager.auto_create_handle_loop does.
    loop.add_signal_handler(signal.SIGQUIT, SignalHandler(manager).running_phase_sigquit_handler)
    scheduler = subprocess.Popen(
        [sys.executable, fault_server.__file__, folder, "scheduler"],
        env=os.environ | {"LOWLAT_FAULT_DIR": folder},
        stdout=subprocess.DEVNULL,
    )
    loop.run_until_complete(asyncio.sleep(BUDGET_S))
    scheduler.kill()
    sys.exit("nobody stopped this process")


if __name__ == "__main__":
    main(sys.argv[1])
