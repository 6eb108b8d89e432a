"""Drive a headless Chromium over its DevTools pipe: no package is needed, only the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT = 60.0
"""Seconds after which a browser that says nothing has failed."""


def find_browser() -> str | None:
    """The path of a Chromium or Chrome, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One open page."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._unread = b""
        self._calls = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools call; events that arrive meanwhile are noted."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT
        while b"\0" not in self._unread:
            assert time.monotonic() < deadline, "the browser does not answer"
            more = os.read(self._from, 1 << 16)
            assert more, "the browser has gone"
            self._unread += more
        text, self._unread = self._unread.split(b"\0", 1)
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(event["params"]["exceptionDetails"])[:2000])

    def open(self, path: Path) -> None:
        """Open a file, and wait until it has drawn itself."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + WAIT
        while self.value("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < deadline, "the page does not load"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON has it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of the first element that a selector finds."""
        element = f"document.querySelector({json.dumps(selector)})"
        assert self.value(f"{element} !== null"), f"no element is {selector}"
        self.value(f"{element}.scrollIntoView({{block: 'center'}})")
        x, y, width = self.value(
            "(r => [r.x + r.width / 2, r.y + r.height / 2, r.width])"
            f"({element}.getBoundingClientRect())"
        )
        assert width > 0, f"{selector} is not to be seen"
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **place)

    def resize(self, width: int | None) -> None:
        """Make the window so many pixels wide; ``None`` for its first size."""
        if width is None:
            self.call("Emulation.clearDeviceMetricsOverride")
        else:
            size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
            self.call("Emulation.setDeviceMetricsOverride", **size)

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """The whole page as a picture."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def open_browser(binary: str, folder: Path) -> Iterator[Page]:
    """A page of a new headless browser, whose profile is in ``folder``."""
    # The browser reads its descriptor 3 and writes its descriptor 4.
    for_browser, to_browser = os.pipe()
    from_browser, of_browser = os.pipe()
    script = 'exec "$0" "$@" 3<&"$IN" 4>&"$OUT"'
    process = subprocess.Popen(
        [
            *("bash", "-c", script, binary, "--headless", "--no-sandbox", "--disable-gpu"),
            *("--remote-debugging-pipe", f"--user-data-dir={folder}", "--window-size=1250,1000"),
        ],
        env={**os.environ, "IN": str(for_browser), "OUT": str(of_browser)},
        pass_fds=(for_browser, of_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(for_browser)
    os.close(of_browser)
    try:
        page = Page(to_browser, from_browser)
        yield page
        page._session = None
        page.call("Browser.close")
    finally:
        os.close(to_browser)
        os.close(from_browser)
        process.terminate()
        process.wait(WAIT)
