"""Chromium without a screen, driven by its own protocol over a pipe: no server, no port, no driver.

`open_page` opens a tab. `missing` says what the tests lack.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60.0
FLAGS = [
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check",
    "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
    "--force-color-profile=srgb", "--font-render-hinting=none",
]  # fmt: skip

_START = """
import os, sys
ends = [os.dup(int(end)) for end in sys.argv[1:3]]  # 3 or 4 may be one of these already
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
    os.set_inheritable(number, True)  # also if they were the same
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Makes two ends of pipes the files 3 and 4, by which Chromium takes commands and gives answers;
in a process of its own, since one that runs JAX must not fork."""


@functools.cache
def executable() -> str | None:
    """Chromium, or None; the variable CHROMIUM may name it."""
    named = os.environ.get("CHROMIUM")
    found = (shutil.which(name) for name in ((named,) if named else NAMES))
    return next((path for path in found if path), None)


def missing() -> str:
    """What pages can't be opened for want of; empty if nothing is."""
    return "" if executable() else "Chromium (apt-get install chromium)"


class Browser:
    """A Chromium with a profile of its own."""

    def __init__(self, profile: str):
        path = executable()
        assert path is not None, missing()
        flags = [*FLAGS, f"--user-data-dir={profile}"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        reads, self._commands = os.pipe()
        self._answers, writes = os.pipe()

        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(reads), str(writes), path, *flags, "about:blank"],
            pass_fds=(reads, writes),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and waits for what it gives."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self.events.append(found)

    def wait_for(self, method: str, session: str) -> None:
        """Waits for an event, or finds that it was there already."""
        seen = 0
        while True:
            for event in self.events[seen:]:
                if event.get("method") == method and event.get("sessionId") == session:
                    return
            seen = len(self.events)
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            left = end - time.monotonic()
            ready = select.select([self._answers], [], [], max(left, 0))[0]
            assert ready, f"Chromium said nothing for {SECONDS:.0f} s"
            data = os.read(self._answers, 1 << 20)
            assert data, f"Chromium ended with {self._process.wait()}"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        for handle in (self._commands, self._answers):
            os.close(handle)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium, ended and forgotten afterwards."""
    with tempfile.TemporaryDirectory(
        prefix="beamjax-browser-", ignore_cleanup_errors=True
    ) as folder:
        found = Browser(folder)
        try:
            yield found
        finally:
            found.close()


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str, target: str):
        self._browser = browser
        self._session = session
        self._target = target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol for this tab."""
        return self._browser.call(method, self._session, **params)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, which may be a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and all that was fetched."""
        self.run("new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve, 50)))")
        told = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            match event["method"]:
                case "Runtime.exceptionThrown":
                    told.append(str(event["params"]["exceptionDetails"]))
                case "Runtime.consoleAPICalled":
                    told.append(str(event["params"]["args"]))
                case "Log.entryAdded":
                    told.append(str(event["params"]["entry"]))
                case "Network.requestWillBeSent":
                    url = event["params"]["request"]["url"]
                    if url != self.url and not url.startswith("data:"):
                        told.append(f"asked for {url}")
        return told

    def show(self, url: str) -> None:
        """Goes to a page, and waits until it is loaded."""
        self.url = url
        self._browser.events.clear()
        self.call("Page.navigate", url=url)
        self._browser.wait_for("Page.loadEventFired", self._session)

    def size(self, width: int, height: int = 900) -> None:
        """Makes the window as large as this, in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip

    def scheme(self, name: str, media: str = "") -> None:
        """Makes people prefer "light" or "dark"; `media` may be "print"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def scripts(self, on: bool) -> None:
        """Whether pages that are shown from now on run scripts."""
        self.call("Emulation.setScriptExecutionDisabled", value=not on)

    def click(self, x: float, y: float) -> None:
        """A click of the mouse at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Moves the mouse with its button down."""
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        moves = [("mousePressed", start), ("mouseMoved", middle), ("mouseMoved", end)]
        for kind, (x, y) in [*moves, ("mouseReleased", end)]:
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1,
                clickCount=1,
            )  # fmt: skip

    def wheel(self, x: float, y: float, by: float, ctrl: bool) -> None:
        """Turns the wheel, with or without Ctrl."""
        self.call(
            "Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by,
            modifiers=2 if ctrl else 0,
        )  # fmt: skip

    def key(self, name: str, text: str = "") -> None:
        """Presses a key: `Tab`, `Enter`, `ArrowLeft`, or a letter."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"Enter": "\r"}.get(name, text or (name if len(name) == 1 else ""))
        code = codes.get(name, ord(name[0]))
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **typed
            )

    def screenshot(self, path: Path) -> None:
        """Writes a picture of the whole page to a PNG file."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Closes the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)


def open_page(browser: Browser) -> Page:
    """A new tab, of which all is heard."""
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    page = Page(browser, session, target)
    for domain in ("Page", "Runtime", "Log", "Network"):
        page.call(f"{domain}.enable")
    return page
