"""The server under test of trouble.py, and what its clients need to talk to it."""
import atexit
import http.client
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import tempfile
import time

WORDS = ("the river ran past old mills and quiet fields while a train crossed the stone bridge every hour and people "
         "waited on the platform reading letters about harvest rain and distant cities").split()
CONTEXT = 2048
ANSWER = 24
KV = ["full", "quest:block=16,budget=128", "snapkv:budget=96"]


def check(holds, what):
    if not holds:
        raise AssertionError(what)


tokens_per_word = None
QUARANTINE = 16 << 20  # bytes of freed memory that the address sanitizer keeps


def text(tokens, seed):
    """About so many tokens, as the model under test counts."""
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(max(1, int(tokens / tokens_per_word))))


class Server:
    def __init__(self, options, *flags, limit=None):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log = tempfile.TemporaryFile()
        command = [options.longkv, "serve", "-m", options.model, "--port", str(self.port), "-c", str(CONTEXT), "--metrics",
                   "-t", "2", *flags]
        for kv in KV[1:]:
            command += ["--allow-kv", kv]
        env = dict(os.environ)
        self.sanitized, self.patience = options.sanitized, 20 if options.sanitized else 1
        if options.sanitized:
            env["ASAN_OPTIONS"] = f"quarantine_size_mb={QUARANTINE >> 20}:" + env.get("ASAN_OPTIONS", "")
        before = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, preexec_fn=before, env=env)
        atexit.register(self.process.kill)  # a failed check leaves no server behind
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}: {self.said()}")
            try:
                if self.call("GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.02)
        global tokens_per_word
        if not tokens_per_word:
            tokens_per_word = len(self.call("POST", "/tokenize", {"content": " ".join(WORDS)})[1]["tokens"]) / len(WORDS)

    def said(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def call(self, method, path, body=None, timeout=120):
        """Status and parsed body."""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout * self.patience)
        try:
            payload = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
            c.request(method, path, payload, {"Content-Type": "application/json"})
            r = c.getresponse()
            data = r.read()
        finally:
            c.close()
        try:
            return r.status, json.loads(data)
        except ValueError:
            return r.status, data

    def socket(self, small=False):
        s = socket.socket()
        if small:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        s.settimeout(60 * self.patience)
        s.connect(("127.0.0.1", self.port))
        return s

    def post(self, s, path, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        s.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
                  f"Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def idle(self):
        return all(slot["state"] == "idle" for slot in self.call("GET", "/slots")[1])

    def wait_idle(self, seconds=60):
        end = time.time() + seconds * self.patience
        while not self.idle():
            check(time.time() < end, f"a slot is still busy after {seconds * self.patience} s")
            time.sleep(0.02)

    def private_bytes(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        check(self.process.wait(60 * self.patience) is not None, "the server does not end")
        self.no_report()
        return self.process.returncode

    def no_report(self):
        said = self.said() if self.sanitized else ""
        check("Sanitizer" not in said and "runtime error" not in said, said[-20000:])

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.no_report()


def leave(s):
    """Resets the connection."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.close()


def body_of(prompt, kv, **more):
    return dict(prompt=prompt, kv=kv, n_predict=ANSWER, temperature=0, ignore_eos=True, return_tokens=True, **more)


def streamed(raw):
    """Text of a streamed answer, None where it is an error or incomplete."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        return None
    data = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        n = int(size, 16) if size else 0
        if n == 0:
            break
        data, rest = data + rest[:n], rest[n + 2:]
    text, whole = "", False
    for line in data.split(b"\n\n"):
        if line.startswith(b"data: {"):
            message = json.loads(line[6:])
            if "error" in message:
                return None
            text += message.get("content", "")
            whole |= message.get("stop", False)
    return text if whole else None
