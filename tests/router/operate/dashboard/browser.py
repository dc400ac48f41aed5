"""A real headless Chromium, driven over its DevTools protocol (1.3): no more of it than a page needs."""

from __future__ import annotations

import asyncio
import base64
import itertools
import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
START_S = 60.0
PATIENCE_S = 6.0
MARGIN = 12

_SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb"),
)


@contextmanager
def a_browser() -> Iterator[str]:
    """The browser's address for `a_page`; it is ended at the end."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [PROGRAM, *_SWITCHES, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield _address(Path(profile, "DevToolsActivePort"), process)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        # the process does not report when it is ready
        time.sleep(0.02)
    raise AssertionError("chromium did not start")


class Page:
    """One tab. `complaints` are errors of its scripts and what the console shows as errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers, self._session = socket, itertools.count(1), ""
        self._size = (0, 0)
        self.complaints: list[str] = []

    async def open(self, *, width: int, height: int) -> None:
        target = (await self._call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self._call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable")
        await self.resize(width, height)

    async def resize(self, width: int, height: int) -> None:
        self._size = (width, height)
        await self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def go(self, url: str) -> None:
        await self._call("Page.navigate", url=url)

    async def look(self, *, dark: bool = False, vision: str = "none") -> None:
        """See it in a colour scheme, without transitions, and with a kind of colour vision such as deuteranopia."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        await self._call("Emulation.setEmulatedMedia", features=[scheme, still])
        await self._call("Emulation.setEmulatedVisionDeficiency", type=vision)

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        done = await self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        watch = (
            f"new Promise((ok) => {{ const look = () => {{ let is = false; try {{ is = {condition}; }} catch {{}}"
            " is ? ok(true) : setTimeout(look, 20); }; look(); })"
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await self._holds(watch):
                    pass
        except TimeoutError as error:
            shown = await self.run("document.body ? document.body.innerText : ''")
            raise AssertionError(f"never: {condition}\n{self.complaints}\n{shown}") from error

    async def _holds(self, watch: str) -> bool:
        """Whether the watched condition holds; False if the page went away meanwhile, with its watcher."""
        try:
            return bool(await self.run(watch))
        except AssertionError as error:
            if "navigated or closed" not in str(error) and "context was destroyed" not in str(error):
                raise
            return False

    async def text(self, selector: str) -> str:
        return str(await self.run(f"document.querySelector({selector!r}).innerText"))

    async def press(self, key: str) -> None:
        """Press one key, as a person does: where it goes is what has the focus."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = {"Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9, "Escape": 27}.get(key, 0)
        down: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
        await self._call("Input.dispatchKeyEvent", type="keyDown", **down)
        await self._call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def type(self, text: str) -> None:
        await self._call("Input.insertText", text=text)

    async def picture(self, path: Path, *, first: str = "body", last: str = "body") -> None:
        """The page as PNG, from the element `first` to `last`.

        The window is as high as the page meanwhile: else what sticks to its top would lie over the middle.
        """
        before = self._size
        size = (await self._call("Page.getLayoutMetrics"))["cssContentSize"]
        await self.resize(before[0], max(before[1], math.ceil(size["height"])))
        await self.run("scrollTo(0, 0)")
        place = "document.querySelector({!r}).getBoundingClientRect().{} + scrollY"
        top, bottom = await self.run(place.format(first, "top")), await self.run(place.format(last, "bottom"))
        clip = {
            "x": 0,
            "y": max(0, top - MARGIN),
            "width": size["width"],
            "height": bottom - top + 2 * MARGIN,
            "scale": 1,
        }
        shot = await self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        await self.resize(*before)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))

    async def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json({**message, "sessionId": self._session} if self._session else message)
        while True:
            content = await self._socket.receive_json()
            self._hear(content)
            if content.get("id") == number:
                assert "error" not in content, f"{method}: {content['error']}"
                return content["result"]

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(str(params["entry"]))


@asynccontextmanager
async def a_page(browser: str, *, width: int = 1440, height: int = 900) -> AsyncIterator[Page]:
    """A tab of `browser`, blank."""
    async with aiohttp.ClientSession() as http, http.ws_connect(browser, max_msg_size=2**28) as socket:
        page = Page(socket)
        await page.open(width=width, height=height)
        yield page
