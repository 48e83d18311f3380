"""A headless Chromium that is told what to do by its own debugging protocol, over two pipes.

Small on purpose: a page is opened, measured and asked; nothing is installed for it.
"""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
BUDGET_S = 60


def find() -> str | None:
    """The path of a browser that can be used, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page. Everything that the page tells is in `events`."""

    def __init__(self, path: str, profile: Path) -> None:
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()
        words = [
            path,
            "--headless",
            "--remote-debugging-pipe",
            "--no-sandbox",  # the tests' own page, which runs no script; containers have no sandbox
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        # The browser reads descriptor 3 and writes 4; bash puts ours there.
        command = f'exec "$@" 3<&{read_end} 4>&{write_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *words],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._bytes = b""
        self._last_id = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol and waits for its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + BUDGET_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def wait(self, method: str) -> None:
        """Waits for an event that has not been waited for."""
        deadline = time.monotonic() + BUDGET_S
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next(deadline))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._bytes:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self._from, 1 << 16) if ready else b""
            assert chunk, "the browser does not answer"
            self._bytes += chunk
        message, _, self._bytes = self._bytes.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Opens a file as a screen of that width with that colour scheme shows it."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        self.wait("Page.loadEventFired")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        os.close(self._to)
        os.close(self._from)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
