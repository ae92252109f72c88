"""A headless Chromium that a test steers over a pipe, with the DevTools protocol: no driver, no package."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_SECONDS = 60.0


class Page:
    """The browser's one page."""

    def __init__(self, write_to: int, read_from: int):
        self._write_to, self._read_from = write_to, read_from
        self._buffer, self._number, self._session = b"", 0, None
        self.told: list[str] = []  # what the page wrote to its console, and what it was refused
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Go to an address, and wait until the dashboard there has been drawn."""
        self._call("Page.navigate", url=address)
        self.until("location.href !== 'about:blank' && document.documentElement?.dataset.drawn")

    def evaluate(self, expression: str):
        """Return the value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            body = self.evaluate("document.body && document.body.innerText")
            assert time.monotonic() < deadline, f"in vain for {_SECONDS:.0f} s: {expression}\n{self.told}\n{body}"
            time.sleep(0.1)

    def _call(self, method: str, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            if answer.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.told.append(json.dumps(answer["params"]))

    def _read(self) -> dict:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read_from], [], [], _SECONDS)
            assert ready, f"Chromium said nothing for {_SECONDS:.0f} s"
            fresh = os.read(self._read_from, 1 << 16)
            assert fresh, "Chromium has ended"
            self._buffer += fresh
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def chromium():
    """Yield a page of a fresh headless Chromium, which is gone afterwards with its profile."""
    (its_read, our_write), (our_read, its_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --mute-audio"
        # Chromium wants the pipes as its descriptors 3 and 4; a shell puts them there.
        command = f'exec "$0" {options} --remote-debugging-pipe --user-data-dir="$1" 3<&{its_read} 4>&{its_write}'
        with (Path(profile) / "chromium.log").open("wb") as log:
            browser = subprocess.Popen(
                ["bash", "-c", command, CHROMIUM, profile], pass_fds=(its_read, its_write), stdout=log, stderr=log
            )
        os.close(its_read)
        os.close(its_write)
        try:
            yield Page(our_write, our_read)
        finally:
            os.close(our_write)  # it ends when its pipe does
            try:
                browser.wait(timeout=20)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait(timeout=10)
            os.close(our_read)
