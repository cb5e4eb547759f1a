# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium and one page in it, over the DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.support.waiting import WAIT_S, wait_for

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

_OPTIONS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
]


class PageError(AssertionError):
    """The page threw."""


class Tab:
    """A page.

    `messages` are what its console said and exceptions that nobody caught, `urls` what it asked for.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._next_id = 0
        self.messages: list[str] = []
        self.urls: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next_id += 1
        self._connection.send(
            json.dumps({"id": self._next_id, "method": method, "params": parameters})
        )
        until_s = time.monotonic() + WAIT_S
        while True:
            message = json.loads(self._connection.recv(timeout=until_s - time.monotonic()))
            if message.get("id") == self._next_id:
                if "error" in message:
                    raise PageError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled":
            said = [str(each.get("value", each.get("description"))) for each in parameters["args"]]
            self.messages.append(" ".join(said))
        elif method == "Log.entryAdded":
            self.messages.append(f"{parameters['entry']['text']} {parameters['entry'].get('url')}")
        elif method == "Network.requestWillBeSent":
            self.urls.append(parameters["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited.

        Raises:
            PageError: it throws.
        """
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        wait_for(lambda: self.evaluate("document.readyState") == "complete")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def wait(self, expression: str) -> Any:
        """Until the expression is true: its value."""
        try:
            return wait_for(lambda: self.evaluate(expression))
        except AssertionError:
            raise AssertionError(f"waited in vain for {expression}: {self.messages}") from None

    def wait_text(self, selector: str, part: str) -> None:
        self.wait(
            f"document.querySelector({json.dumps(selector)}).innerText.includes({json.dumps(part)})"
        )

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def click_at(self, x: float, y: float, clicks: int = 1) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left",
                      clickCount=clicks)  # fmt: skip

    def move_to(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def resize(self, width: int, height: int, *, ratio: float = 1.0, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=ratio, mobile=mobile)  # fmt: skip

    def prefer(self, theme: str) -> None:
        """The colour scheme of the system."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )

    def picture(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def heap_bytes(self) -> int:
        """What is used after a garbage collection."""
        self.call("HeapProfiler.collectGarbage")
        return int(self.call("Runtime.getHeapUsage")["usedSize"])


class Browser:
    """A Chromium that runs; tabs share nothing."""

    def __init__(self, address: str) -> None:
        self._connection = connect(address, max_size=None, open_timeout=WAIT_S)
        self._root = address.partition("/devtools/")[0]
        self._next_id = 0

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._next_id += 1
        self._connection.send(
            json.dumps({"id": self._next_id, "method": method, "params": parameters})
        )
        while True:
            message = json.loads(self._connection.recv(timeout=WAIT_S))
            if message.get("id") == self._next_id:
                return message["result"]

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        context = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call("Target.createTarget", url="about:blank", browserContextId=context)
        path = f"{self._root}/devtools/page/{target['targetId']}"
        try:
            with connect(path, max_size=None, open_timeout=WAIT_S) as connection:
                yield Tab(connection)
        finally:
            self._call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        try:
            self._call("Browser.close")
        except ConnectionClosed:
            pass
        self._connection.close()


@contextmanager
def browser(*options: str) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}", *options, "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = Path(folder, "DevToolsActivePort")
            wait_for(lambda: port_file.exists() and port_file.read_text().count("\n") == 1)
            port, path = port_file.read_text().split("\n")
            running = Browser(f"ws://127.0.0.1:{port}{path}")
            yield running
            running.close()
        finally:
            process.terminate()
            process.wait()
