"""Uses the page as a person does: python page.py CHROMIUM ADDRESS FOLDER. Real key strokes and clicks through Chromium's
debugging protocol; screenshots go to FOLDER. Prints OK. Python's standard library only."""
import base64
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request


class WebSocket:
    """The client's side of RFC 6455: text messages, nothing else."""

    def __init__(self, url):
        host, path = url.removeprefix("ws://").split("/", 1)
        name, port = host.split(":")
        self.socket = socket.create_connection((name, int(port)), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.data = b""
        while b"\r\n\r\n" not in self.data:
            self.data += self.socket.recv(65536)
        self.data = self.data.split(b"\r\n\r\n", 1)[1]

    def need(self, n):
        while len(self.data) < n:
            more = self.socket.recv(1 << 20)
            if not more:
                raise SystemExit("the browser left")
            self.data += more
        out, self.data = self.data[:n], self.data[n:]
        return out

    def send(self, text):
        payload, mask = text.encode(), os.urandom(4)
        n = len(payload)
        head = bytes([0x81]) + (bytes([0x80 | n]) if n < 126 else
                                bytes([0xfe]) + struct.pack(">H", n) if n < 65536 else bytes([0xff]) + struct.pack(">Q", n))
        self.socket.sendall(head + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(payload)))

    def receive(self):
        text = b""
        while True:
            first, second = self.need(2)
            n = second & 127
            if n == 126:
                n, = struct.unpack(">H", self.need(2))
            elif n == 127:
                n, = struct.unpack(">Q", self.need(8))
            text += self.need(n)
            if first & 0x80:
                return text.decode()


class Page:
    def __init__(self, browser, address):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             "--user-data-dir=" + self.folder.name, "--window-size=1200,900", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file = os.path.join(self.folder.name, "DevToolsActivePort")
        for _ in range(300):
            if os.path.exists(port_file) and open(port_file).read().count("\n") >= 1:
                break
            time.sleep(0.1)
        port = open(port_file).read().split("\n")[0]
        request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new?{address}", method="PUT")
        self.ws = WebSocket(json.load(urllib.request.urlopen(request))["webSocketDebuggerUrl"])
        self.next_id, self.requests, self.problems = 0, [], []
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.call(domain + ".enable")
        self.call("Page.reload")

    def note(self, message):
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def call(self, method, **params):
        self.next_id += 1
        self.ws.send(json.dumps({"id": self.next_id, "method": method, "params": params}))
        while True:
            message = json.loads(self.ws.receive())
            if message.get("id") == self.next_id:
                if "error" in message:
                    raise SystemExit(f"{method}: {message['error']}")
                return message["result"]
            self.note(message)

    def run(self, script):
        return self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)["result"].get("value")

    def wait(self, script, what, seconds=60):
        end = time.time() + seconds
        while time.time() < end:
            if self.run(script):
                return
            time.sleep(0.1)
        raise SystemExit(f"waited {seconds} s in vain for: {what}; the page says: {self.run('document.body.innerText')}")

    def click(self, selector):
        x, y = self.run(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView(); const r = "
                        "e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, selector, file, *kinds):
        """A file from the desktop over an element, as the browser sees it: dragEnter, dragOver, drop."""
        x, y = self.run(f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect(); "
                        "return [r.x + r.width / 2, r.y + r.height / 2]; })()")
        for kind in kinds:
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data={"items": [], "files": [file], "dragOperationsMask": 1})

    def type(self, text):
        self.call("Input.insertText", text=text)

    def key(self, name, code):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code,
                      **({"text": "\r"} if name == "Enter" and kind == "keyDown" else {}))

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.folder.cleanup()


def text_of(item):
    return f"document.querySelectorAll('#messages li')[{item}]?.lastChild.textContent ?? ''"


def main():
    browser, address, folder = sys.argv[1:4]
    page = Page(browser, address)
    try:
        page.wait("document.querySelector('#model').textContent.includes('tokens of context')", "the connection")
        recipes = page.run("[...document.querySelectorAll('#recipe option')].map(o => o.value)")
        assert len(recipes) >= 2, recipes
        page.screenshot(os.path.join(folder, "page-empty.png"))

        # A document is dragged onto its box, as the browser does it; another one, as a script does it, away again and then dropped beside
        # the box, where the browser would leave the page for it.
        over = "document.querySelector('#drop').classList.contains('over')"
        path = os.path.join(folder, "dropped.txt")
        with open(path, "w") as file:
            file.write("A mill has a wheel, and the wheel has a keeper. " * 20)
        page.drag("#drop", path, "dragEnter", "dragOver")
        page.wait(over, "the box shows that it takes the file", 10)
        page.drag("#drop", path, "drop")
        taken = "document.querySelector('#document-text').textContent.match(/^%s: [0-9,. ]+ tokens/)"
        page.wait(taken % "dropped.txt", "the dropped file is the document", 20)
        assert not page.run(over), "the box is itself again"
        assert page.run("document.activeElement.id") == "question", "the next thing is the question"
        page.run("""window.dragged = new DataTransfer();
                    dragged.items.add(new File(['The keeper sleeps. '.repeat(30)], 'beside.txt', {type: 'text/plain'}));
                    window.drags = (place, kind) => document.querySelector(place).dispatchEvent(
                      new DragEvent(kind, {bubbles: true, cancelable: true, dataTransfer: dragged}))""")
        assert page.run("!drags('#question', 'dragenter') && !drags('#question', 'dragover')"), "the page takes files anywhere"
        assert page.run(over), "the box shows where it goes"
        page.run("drags('body', 'dragleave')")
        assert not page.run(over), "the file was carried away"
        assert page.run("!drags('#drop', 'dragover') && !drags('#question', 'drop')"), "the browser does not open the file"
        page.wait(taken % "beside.txt", "the file dropped beside the box is the document", 20)
        assert not page.run(over), "the box is itself again"
        page.screenshot(os.path.join(folder, "page-dropped.png"))
        page.click("#remove")
        page.wait("document.querySelector('#document-text').textContent.includes('Drop a document') && "
                  "document.querySelector('#model').textContent.includes('tokens of context')", "a page without document")

        # A question by keyboard.
        page.click("#length")
        page.run("document.querySelector('#length').value = 24")
        page.click("#question")
        page.type("Name a colour.")
        page.key("Enter", 13)
        page.wait("document.querySelector('#runs tbody').rows.length === 1", "the first answer's cost")
        assert page.run(text_of(1)), "an answer"
        assert page.run("document.querySelector('#m-speed').textContent").endswith("tokens/s")

        # A document, another recipe, a question by mouse.
        path = os.path.join(folder, "document.txt")
        with open(path, "w") as file:
            file.write("The old mill stands beside the river, and its keeper is called Anselm. " * int(sys.argv[4]))
        root = page.call("DOM.getDocument")["root"]["nodeId"]
        node = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        page.call("DOM.setFileInputFiles", nodeId=node, files=[path])
        page.wait("document.querySelector('#document-text').textContent.includes('tokens')", "the document's length")
        page.run(f"document.querySelector('#recipe').value = {json.dumps(recipes[1])}")
        page.run("window.progress = []; new MutationObserver(() => window.progress.push(document.querySelector('#progress-text').value))"
                 ".observe(document.querySelector('#progress-text'), {childList: true, characterData: true, subtree: true})")
        page.click("#question")
        page.type("Who keeps the mill?")
        page.click("#send")
        page.wait("document.querySelector('#progress-text').value.includes('tokens/s')", "reading progress")
        page.screenshot(os.path.join(folder, "page-reading.png"))
        page.wait("document.querySelector('#runs tbody').rows.length === 2", "the second answer's cost", 120)
        assert page.run("document.querySelector('#m-mass').textContent").endswith("%")
        assert "select=" in page.run("document.querySelector('#recipe-text').textContent"), "the recipe in full"
        steps = page.run("window.progress")
        assert len(steps) >= 3 and steps[0].endswith(" tokens") and steps[-1].endswith(" left"), steps
        assert not any(", 0 tokens/s" in s for s in steps), steps
        # The same document again: nothing but the question is read.
        page.click("#question")
        page.type("What stands beside the river?")
        page.key("Enter", 13)
        page.wait("document.querySelector('#runs tbody').rows.length === 3", "the third answer's cost", 120)
        page.screenshot(os.path.join(folder, "page-light.png"))

        # Stop.
        page.run("document.querySelector('#length').value = 5000")
        page.run("document.querySelector('#temperature').value = 1.5")
        page.click("#question")
        page.type("Write a very long story.")
        page.key("Enter", 13)
        page.wait(f"({text_of(5)}).length > 1 || document.querySelector('#status').textContent.includes('Cut')", "a fourth answer")
        page.click("#stop")
        page.wait("document.querySelector('#stop').disabled", "the end of the answer", 5)

        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        page.screenshot(os.path.join(folder, "page-dark.png"))
        page.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
        page.screenshot(os.path.join(folder, "page-narrow.png"))
        assert page.run("document.documentElement.scrollWidth <= 400"), "a narrow page does not scroll sideways"
        # Every control has a name, and nothing came from elsewhere.
        unnamed = page.run("[...document.querySelectorAll('button,input,select,textarea,progress')].filter(e => "
                           "!(e.labels && e.labels.length) && !e.textContent.trim() && !e.ariaLabel).map(e => e.id)")
        assert unnamed == [], unnamed
        foreign = [r for r in page.requests if not r.startswith(address.rstrip("/")) and not r.startswith("data:")]
        assert foreign == [], foreign
        assert page.problems == [], page.problems
    finally:
        page.close()
    print("OK")


main()
