"""Headless Chromium, driven through its DevTools protocol: enough to click through a page and read its console."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """The browser's path; ``DRACO_TEST_BROWSER`` names another one."""
    return os.environ.get("DRACO_TEST_BROWSER") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab of one browser process, with a profile of its own under ``folder``."""

    def __init__(self, program: str, folder: Path, size: tuple[int, int] = (1400, 900)) -> None:
        profile = folder / "profile"
        # Inside a container there is no user namespace for Chromium's own sandbox; the page is a local file of ours.
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
        options += ["--disable-dev-shm-usage", "--disable-extensions", "--force-color-profile=srgb"]
        options += [f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        self.process = subprocess.Popen([program, *options, "about:blank"], stderr=subprocess.DEVNULL)
        self.console: list[str] = []
        """Errors and warnings of the page: exceptions, console.error, refused loads."""
        self.requests: list[str] = []
        """URLs that the page requested."""
        self._numbers = itertools.count(1)
        self._open = ExitStack()
        self._tab = self._open.enter_context(connect(self._address(profile), max_size=None))
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.call("Network.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self.process.terminate()
        self.process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One DevTools command and its result; events that come meanwhile are noted."""
        number = next(self._numbers)
        self._tab.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._tab.recv())
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def goto(self, url: str) -> None:
        """Open ``url`` (or another place on the same page)."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 600) -> Any:
        """Wait until a JavaScript expression is true; returns it.

        Raises:
            TimeoutError: with the condition, if it stays false.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := self.run(condition):
                return value
            time.sleep(0.05)
        raise TimeoutError(f"{condition}; console: {self.console}")

    def wait_until(self, condition: Callable[[], object], seconds: float = 600) -> None:
        """Wait for something outside the page.

        Raises:
            TimeoutError: it does not come.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{condition}; console: {self.console}")
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that matches, as a mouse does: the topmost element gets the click."""
        found = json.dumps(selector)
        self.run(f"document.querySelector({found}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"document.querySelector({found}).getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def type(self, selector: str, text: str) -> None:
        """Put the cursor into a field and type."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def look(self, *, width: int = 1400, media: str = "screen", scheme: str = "light") -> None:
        """Set the page's width in pixels, its medium (screen or paper) and its color scheme (light or dark)."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def press(self, key: str) -> None:
        """Press a key by its name, e.g. ``j`` or ``ArrowRight``."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def enter(self) -> None:
        """Press the enter key."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def downloads(self, folder: Path) -> None:
        """Let the page's downloads be saved in ``folder``."""
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def screenshot(self, path: Path) -> None:
        """Save a screenshot of the window as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _address(self, profile: Path) -> str:
        """URL of the tab's DevTools socket; the browser writes its port into its profile."""
        note = profile / "DevToolsActivePort"
        while not note.exists() or "\n" not in note.read_text():
            assert self.process.poll() is None, f"the browser ended with code {self.process.returncode}"
            time.sleep(0.05)
        port = note.read_text().splitlines()[0]
        targets = httpx.get(f"http://127.0.0.1:{port}/json/list", trust_env=False, timeout=None).json()
        return next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.console.append(json.dumps(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.console.append(json.dumps(parameters["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Page.javascriptDialogOpening":
                self.console.append(f"dialog: {parameters['message']}")
