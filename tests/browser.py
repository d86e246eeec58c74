"""Drives a headless Chromium by its DevTools protocol over pipes: opens a page, evaluates JavaScript, pictures it."""

import base64
import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

from tests.patience import HANG_S, patient

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BOUND_S = patient(HANG_S)


def find_browser() -> str | None:
    """Return the path of an installed Chromium or Chrome, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """Holds one open page. Every call is bounded in time and raises TimeoutError."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._rest, self._number, self._session = read, write, b"", 0, None

    def call(self, method: str, **params: object) -> dict[str, object]:
        """Send a command and return its result. Raises AssertionError for an error of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + BOUND_S
        while True:
            while b"\0" not in self._rest:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._read], [], [], left)[0]:
                    raise TimeoutError(f"the browser has not answered {method} within {BOUND_S} s")
                part = os.read(self._read, 1 << 16)
                assert part, f"the browser ended during {method}"
                self._rest += part
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, address: str, width: int = 1200, height: int = 910) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=address)

    def evaluate(self, expression: str) -> object:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, expected: object) -> None:
        """Wait until an expression has a value; while the page is read, it may name what is not there yet."""
        deadline = time.monotonic() + BOUND_S
        tried = f"(() => {{ try {{ return {expression} }} catch (e) {{ return String(e) }} }})()"
        while (value := self.evaluate(tried)) != expected:
            assert time.monotonic() < deadline, f"{expression} is {value!r} and not {expected!r} after {BOUND_S} s"
            time.sleep(0.05)

    def picture(self, path: pathlib.Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def open_page(address: str, profile: pathlib.Path) -> Iterator[Page]:
    """Open ``address`` in a browser of its own, which ends with the block. profile: a folder that is not there yet."""
    (to_read, from_write), (from_read, to_write) = os.pipe(), os.pipe()
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    # the browser reads commands from descriptor 3 and writes answers to 4
    pipes = f"--hide-scrollbars --remote-debugging-pipe 3<&{to_read} 4>&{to_write}"
    command = [
        "bash",
        "-c",
        f'exec "$0" "--user-data-dir=$1" {flags} {pipes}',
        find_browser() or "chromium",
        str(profile),
    ]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    process = subprocess.Popen(command, pass_fds=(to_read, to_write), **quiet)
    os.close(to_read)
    os.close(to_write)
    try:
        page = Page(from_read, from_write)
        page.open(address)
        yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(BOUND_S)
        os.close(from_read)
        os.close(from_write)
