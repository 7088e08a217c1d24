"""A real browser: headless Chromium, driven by the DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

WAIT_S = 20
KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "End": (35, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
}


class Page:
    """A tab; ``problems`` lists uncaught errors and console messages of level "error"."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._ids = connection, itertools.count(1)
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=WAIT_S))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", str(params)))
        if message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def dark(self, on: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = WAIT_S) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + seconds
        while (value := self.run(f"(() => {{ try {{ return {script} }} catch {{ return null }} }})()")) in (
            None,
            False,
            "",
            0,
        ):
            if time.monotonic() > deadline:
                text = self.run("document.body.innerText")
                raise AssertionError(f"not within {seconds} s: {script}\n{self.problems}\n{text[:3000]}")
            time.sleep(0.02)
        return value

    def text(self, selector: str = "main") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def press(self, key: str, shift: bool = False) -> None:
        code, text = KEYS[key] if key in KEYS else (ord(key.upper()), key)
        event: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def chromium() -> str:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed")
    return program


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with an empty profile in a folder, and one tab."""
    command = [
        chromium(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ]
    command += [f"--user-data-dir={folder}", "--remote-debugging-port=0", "--hide-scrollbars", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = next(line.rsplit(" ", 1)[1].strip() for line in process.stderr if "DevTools listening on" in line)
            with connect(address, max_size=None) as main:
                main.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
                targets = json.loads(main.recv(timeout=WAIT_S))["result"]["targetInfos"]
            tab = next(target["targetId"] for target in targets if target["type"] == "page")
            root = address.split("/devtools/")[0]
            with connect(f"{root}/devtools/page/{tab}", max_size=None) as connection:
                page = Page(connection)
                yield page
                page.call("Browser.close")  # writes its profile
                process.wait(WAIT_S)
        finally:
            process.kill()
