"""A real browser for tests of pages: Chromium without a window, told what to do over a pipe (the DevTools protocol)."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A context manager; `open(path)` shows a file, `run(script)` is what a script's value is there."""

    def __enter__(self) -> "Browser":
        self.profile = tempfile.TemporaryDirectory(prefix="vexact-browser-", ignore_cleanup_errors=True)
        to_it, ours = os.pipe()
        theirs, from_it = os.pipe()
        # What it reads commands from is its descriptor 3, what it answers on its descriptor 4.
        shell = f'exec 3<&{to_it} 4>&{from_it}; exec "$@"'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", "about:blank"]
        command = ["bash", "-c", shell, "bash", find(), *options]
        self.process = subprocess.Popen(
            command, pass_fds=(to_it, from_it), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_it)
        os.close(from_it)
        self.to, self.answers = os.fdopen(ours, "wb", 0), os.fdopen(theirs, "rb", 0)
        self.count, self.rest, self.session = 0, b"", None
        self.errors: list = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *exception) -> None:
        self.to.close()
        self.process.terminate()
        self.process.wait(20)
        self.answers.close()
        self.profile.cleanup()

    def send(self, method: str, **params) -> dict:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]

    def _next(self) -> dict:
        while b"\0" not in self.rest:
            more = self.answers.read(1 << 16)
            if not more:
                raise RuntimeError("the browser has ended")
            self.rest += more
        first, self.rest = self.rest.split(b"\0", 1)
        found = json.loads(first)
        if found.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.errors.append(found["params"])
        if found.get("method") == "Network.requestWillBeSent":
            self.asked.append(found["params"]["request"]["url"])
        return found

    def open(self, path: Path, width: int = 1200, dark: bool = False) -> None:
        """A file as a window of that width shows it. `asked` are the addresses that it was fetched from."""
        self.asked: list[str] = []
        sizes = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **sizes)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.as_uri())
        while self.run("location.href") != path.as_uri() or self.run("document.readyState") != "complete":
            pass

    def run(self, script: str):
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:500])
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        import base64

        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]))
