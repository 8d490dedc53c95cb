"""A headless Chromium, driven through its DevTools protocol over two pipes, so that no library and no port is needed."""

import base64
import fcntl
import json
import os
import signal
from contextlib import contextmanager
from itertools import count
from threading import Condition, Thread

from tests.waiting import until

FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root in a container has none; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
)
ANSWER_SECONDS = 20.0
KEYS = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40, "p": 80}


def found():
    """The path of the Chromium that the tests are to use, None for none: without it their half minute stays out of the suite."""
    return os.environ.get("KVDB_CHROMIUM")


class Browser:
    """A process of Chromium. Its answers and events are read in a thread."""

    def __init__(self, program, folder):
        to_browser, from_browser = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser[0], from_browser[1])]
        quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        ends = [(os.POSIX_SPAWN_DUP2, end, number) for end, number in zip(theirs, (3, 4), strict=True)]
        command = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        environment = {**os.environ, "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        self._process = os.posix_spawn(program, command, environment, file_actions=[*quiet, *ends], setpgroup=0)
        for end in (*theirs, to_browser[0], from_browser[1]):
            os.close(end)
        self._write, self._read = os.fdopen(to_browser[1], "wb", 0), os.fdopen(from_browser[0], "rb")
        self._numbers, self._answers, self._pages = count(1), {}, {}
        self._changed, self._ended = Condition(), False
        self._reader = Thread(target=self._listen, daemon=True)
        self._reader.start()

    def send(self, method, session=None, **parameters):
        """The result of a command. Fails where the browser refuses it or ends."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        self._write.write(json.dumps(message).encode() + b"\0")
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended or number in self._answers, ANSWER_SECONDS), (
                f"no answer to {method}"
            )
            answer = self._answers.pop(number, {"error": "the browser ended"})
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    @contextmanager
    def page(self, url, width=1280, height=800, *, dark=False):
        """A page of a profile of its own, at a URL, that fails the test if anything went wrong in it."""
        profile = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=profile)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        page.open(url, width, height, dark=dark)
        yield page
        del self._pages[session]
        self.send("Target.disposeBrowserContext", browserContextId=profile)
        assert not page.errors

    def close(self):
        self._write.close()  # it ends with its pipe
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self._reader.join()
        self._read.close()

    def _listen(self):
        held = b""
        while piece := self._read.read1(1 << 16):
            *whole, held = (held + piece).split(b"\0")
            for message in map(json.loads, whole):
                with self._changed:
                    if "id" in message:
                        self._answers[message["id"]] = message
                    elif page := self._pages.get(message.get("sessionId")):
                        page.hear(message["method"], message["params"])
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class Page:
    """A page in a browser. errors: what its scripts threw, wrote as errors, or were refused. requests: the URLs it asked for."""

    def __init__(self, browser, session):
        self._browser = browser
        self._session = session
        self.errors = []
        self.requests = []

    def open(self, url, width, height, *, dark):
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1 + phone, mobile=phone)
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url=url)

    def send(self, method, **parameters):
        return self._browser.send(method, self._session, **parameters)

    def hear(self, method, told):
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(told["exceptionDetails"]["exception"].get("description", told["exceptionDetails"]["text"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog opened: {told['message']}")

    def value(self, script):
        """What an expression is in the page; a promise is waited for."""
        answer = self._ask(script)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _ask(self, script):
        return self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)

    def until(self, script):
        """Wait until an expression is true, and return it. One that throws, as before the page is there, is not true."""
        return until(
            lambda: (told := self._ask(script)) and "exceptionDetails" not in told and told["result"].get("value"),
            f"not in the page: {script}",
        )

    def text(self, selector):
        return self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector):
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text):
        self.send("Input.insertText", text=text)

    def press(self, key):
        given = {"key": key, "windowsVirtualKeyCode": KEYS[key]} | ({"text": key} if len(key) == 1 else {})
        given |= {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **given)
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)

    def screenshot(self, path, *, whole=True):
        taken = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
