# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium and one page in it, over the DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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


class PageError(Exception):
    """The page threw."""


class Tab:
    """A page.

    `messages` are what its console said and exceptions that nobody caught, `urls` what it asked
    for.
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

    def reset(self) -> None:
        """As a page that was just opened, with nothing said or asked for."""
        self.call("Page.navigate", url="about:blank")
        self.call("Emulation.setEmulatedMedia", features=[])
        self.resize(1280, 800)
        self.messages.clear()
        self.urls.clear()

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        wait_for(lambda: self._value_or_none("document.readyState") == "complete")

    def text(self, selector: str) -> str:
        """What is to be read in the first element that the selector finds."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def wait(self, expression: str) -> Any:
        """Until the expression is true: its value."""
        try:
            return wait_for(lambda: self._value_or_none(expression))
        except AssertionError:
            raise AssertionError(f"waited in vain for {expression}: {self.messages}") from None

    def _value_or_none(self, expression: str) -> Any:
        """None while one page takes the place of another."""
        try:
            return self.evaluate(expression)
        except PageError as error:
            if "navigated" in str(error) or "context was destroyed" in str(error):
                return None
            raise

    def wait_text(self, selector: str, part: str) -> None:
        text = f"document.querySelector({json.dumps(selector)})?.innerText"
        self.wait(f"{text}?.includes({json.dumps(part)})")

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


@contextmanager
def chromium_tab(*options: str) -> Iterator[Tab]:
    """The only page of the only Chromium that tests have on this machine at a time."""
    assert CHROMIUM is not None
    with ExitStack() as stack:
        lock = Path(tempfile.gettempdir(), "vllm-relay-tests-chromium.lock")
        fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}", *options, "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        port_file = Path(folder, "DevToolsActivePort")
        wait_for(lambda: port_file.exists() and port_file.read_text().count("\n") == 1)
        root = f"127.0.0.1:{port_file.read_text().splitlines()[0]}"
        with urllib.request.urlopen(f"http://{root}/json/list") as answer:
            page = next(each for each in json.load(answer) if each["type"] == "page")
        yield Tab(stack.enter_context(connect(page["webSocketDebuggerUrl"], max_size=None)))
