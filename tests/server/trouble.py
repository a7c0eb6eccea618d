#!/usr/bin/env python3
"""Everything that goes wrong between a server and its clients, against the program itself:

  tests/server/trouble.py LONGKV MODEL [--requests 1000] [--kills 12] [--other-model FILE] [--seed 1] [--parts crowd,kills,limits]
                          [--sanitized]

1. `--requests` requests of mixed kinds from eight clients at once: right ones, ones that leave while their prompt is read or while
   they are answered, bad bodies, wrong types, slow readers, clients that never read. Every completed answer must equal its
   reference, which was computed alone and without reuse; every refusal must be of the right kind; memory must be flat over the
   second half.
2. kill -9 in the middle of saving a slot and of writing the prefix cache, then a restart: the saved file is the old one or the new
   one, whole, and gives the reference's answer; so does whatever the cache holds.
3. A file system that is full, a port in use, a KV file of another model, a prompt over the context, a template without end.

`--sanitized`: the program was built with a sanitizer. It is slower, freed memory lies in a quarantine whose size is then set and allowed
for, and its report in the log is a failure. GCC's programs of that kind want `prlimit --stack=67108864`, those of the thread sanitizer
`setarch -R`.

Prints OK. Python's standard library only; kinds of trouble come from a seeded generator, their timing from the machine."""
import atexit
import argparse
import http.client
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
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


class Crowd:
    """Clients of every kind."""

    def __init__(self, server, options):
        self.server = server
        self.lock = threading.Lock()
        self.counts, self.wrong = {}, []
        pick = random.Random(options.seed)
        shared = text(300, 77)
        # Some share a long beginning.
        self.prompts = [text(pick.randint(4, 60), i) for i in range(4)] + [shared + text(pick.randint(5, 50), i) for i in range(4)]
        self.references = {}
        for prompt in self.prompts:
            for kv in KV:
                status, answer = server.call("POST", "/completion", body_of(prompt, kv, kv_reuse="none"))
                check(status == 200, answer)
                self.references[prompt, kv] = answer["content"]

    def count(self, kind, problem=None):
        with self.lock:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if problem:
                self.wrong.append(f"{kind}: {problem}")

    def compare(self, kind, prompt, kv, content):
        right = self.references[prompt, kv]
        self.count(kind, None if content == right else f"{content!r} instead of {right!r}")

    def whole(self, pick, prompt, kv):
        more = {"cache_salt": "a"} if pick.random() < 0.2 else {}
        status, answer = self.server.call("POST", "/completion", body_of(prompt, kv, **more))
        if status == 503:
            return self.count("refused: full")
        if status != 200:
            return self.count("whole", answer)
        self.compare("whole", prompt, kv, answer["content"])

    def stream(self, pick, prompt, kv):
        s = self.server.socket()
        self.server.post(s, "/completion", body_of(prompt, kv, stream=True))
        raw = b""
        while data := s.recv(65536):
            raw += data
        s.close()
        if raw.startswith(b"HTTP/1.1 503"):
            return self.count("refused: full")
        self.compare("stream", prompt, kv, streamed(raw))

    def slow_reader(self, pick, prompt, kv):
        s = self.server.socket(small=True)
        self.server.post(s, "/completion", body_of(prompt, kv, stream=True, n_probs=20))
        raw = b""
        while data := s.recv(pick.choice([200, 900])):
            raw += data
            time.sleep(0.002)
        s.close()
        if raw.startswith(b"HTTP/1.1 503"):
            return self.count("refused: full")
        self.compare("slow reader", prompt, kv, streamed(raw))

    def leave_reading(self, pick, prompt, kv):
        s = self.server.socket()
        self.server.post(s, "/completion", body_of(text(CONTEXT // 2, pick.random()), kv, stream=pick.random() < 0.5))
        time.sleep(pick.random() * 0.3)
        leave(s)
        self.count("left while reading")

    def leave_answering(self, pick, prompt, kv):
        s = self.server.socket()
        body = body_of(prompt, kv, stream=True)
        body["n_predict"] = 1000
        self.server.post(s, "/completion", body)
        seen = b""
        while seen.count(b"data:") < pick.randint(1, 12):
            data = s.recv(4096)
            if not data:
                break
            seen += data
        leave(s)
        self.count("left while answered")

    def never_reads(self, pick, prompt, kv):
        s = self.server.socket(small=True)
        self.server.post(s, "/completion", body_of(prompt, kv, stream=True, n_probs=20))
        time.sleep(pick.random())
        leave(s)
        self.count("never read")

    def bad_body(self, pick, prompt, kv):
        bodies = [b"{", b"[]", b"null", b"\xff\xfe{}", b'{"prompt":"\xff"}', b"[" * 5000, b'{"prompt":' + b"[" * 300, b"",
                  {"prompt": prompt, "no_such_field": 1}, {"prompt": 5}, {"prompt": prompt, "temperature": "hot"},
                  {"prompt": prompt, "n_predict": [1]}, {"prompt": prompt, "kv": "no such recipe"}, {"prompt": [1, -7]},
                  {"prompt": prompt, "stop": {"a": 1}}, {"prompt": prompt, "id_slot": 99}, {"prompt": prompt, "seed": 1e300},
                  {"prompt": text(3 * CONTEXT, 1)}]
        status, answer = self.server.call("POST", "/completion", pick.choice(bodies))
        good = status == 400 and isinstance(answer, dict) and answer["error"]["code"] == 400 and answer["error"]["message"]
        self.count("bad body", None if good else f"{status} {str(answer)[:200]}")

    def broken_http(self, pick, prompt, kv):
        s = self.server.socket()
        s.sendall(pick.choice([b"POST /completion HT", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n",
                               b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
                               b"POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                               b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n"]))
        time.sleep(pick.random() * 0.05)
        leave(s)
        self.count("broken HTTP")

    def others(self, pick, prompt, kv):
        path, right = pick.choice([("/props", 200), ("/slots", 200), ("/metrics", 200), ("/v1/models", 200), ("/nothing", 404),
                                   ("/completion", 405)])
        status, _ = self.server.call("GET", path)
        self.count("other routes", None if status == right else f"{path}: {status}")

    def run(self, requests, seed):
        kinds = [self.whole] * 5 + [self.stream] * 5 + [self.slow_reader, self.leave_reading, self.leave_reading, self.leave_answering,
                 self.leave_answering, self.never_reads, self.bad_body, self.bad_body, self.broken_http, self.others]
        left = list(range(requests))

        def client():
            while True:
                with self.lock:
                    if not left:
                        return
                    i = left.pop()
                pick = random.Random(seed * 1000003 + i)
                try:
                    pick.choice(kinds)(pick, pick.choice(self.prompts), pick.choice(KV))
                except Exception as e:  # a client that cannot go on is a failure of the server
                    self.count("failed", f"{type(e).__name__}: {e}")

        clients = [threading.Thread(target=client) for _ in range(8)]
        for c in clients:
            c.start()
        for c in clients:
            c.join()


def crowd(options, folder):
    server = Server(options, "-np", "3", "--queue", "4", "--cache-ram", "64M", "--cache-folder", os.path.join(folder, "crowd"),
                    "--cache-disk", "64M", "-q")
    people = Crowd(server, options)
    # Every slot has held the longest prompt, and the cache is as full as it gets, before memory is looked at.
    for slot in range(3):
        server.call("POST", "/completion", body_of(text(CONTEXT * 3 // 4, slot), KV[0], id_slot=slot))
    sizes = []
    for part in range(4):
        people.run(options.requests // 4, options.seed + part)
        server.wait_idle()
        sizes.append(server.private_bytes())
    check(not people.wrong, f"{len(people.wrong)} wrong: {people.wrong[:5]}")
    check(sizes[3] <= sizes[1] * 1.03 + (8 << 20) + (QUARANTINE if options.sanitized else 0), f"memory grows: {sizes}")
    print("requests:", json.dumps(people.counts, sort_keys=True))
    print("private memory after each quarter, MB:", [round(n / 1e6, 1) for n in sizes])
    check(server.stop() == 0, server.said())


def kills(options, folder):
    saved = os.path.join(folder, "slots")
    cache = os.path.join(folder, "cache")
    os.makedirs(saved)
    pick = random.Random(options.seed)
    flags = ["-np", "1", "--slot-save-path", saved, "--cache-ram", "64M", "--cache-folder", cache, "-q"]
    question = " and then"
    server = Server(options, *flags)
    documents = [text(900, 1000 + i) for i in range(2)]
    references = []
    for d in documents:
        references.append(server.call("POST", "/completion", body_of(d + question, KV[0], kv_reuse="none"))[1]["content"])
        server.call("POST", "/completion", body_of(d, KV[0]))
    begin = time.time()
    check(server.call("POST", "/slots/0?action=save", {"filename": "book.kv"})[0] == 200, "save")
    save_time = time.time() - begin
    seen, interrupted = set(), 0
    for i in range(options.kills):
        new = i % 2
        status, answer = server.call("POST", "/completion", body_of(documents[new], KV[0]))
        check(status == 200, answer)
        done = []

        def save():
            try:
                done.append(server.call("POST", "/slots/0?action=save", {"filename": "book.kv"})[0])
            except (OSError, http.client.HTTPException):
                pass

        saver = threading.Thread(target=save)
        saver.start()
        time.sleep(pick.random() * 1.3 * save_time)
        server.kill()
        saver.join()
        interrupted += not done
        server = Server(options, *flags)
        status, answer = server.call("POST", "/slots/0?action=restore", {"filename": "book.kv"})
        check(status == 200, f"after kill {i}: {answer}")
        held = answer["n_restored"]
        # Which of the two it is: the one whose continuation takes over what was restored.
        found = None
        for d, right in zip(documents, references):
            check(server.call("POST", "/slots/0?action=restore", {"filename": "book.kv"})[0] == 200, "restore")
            status, answer = server.call("POST", "/completion", body_of(d + question, KV[0], kv_reuse="exact"))
            check(answer["content"] == right, f"after kill {i}: {answer['content']!r} instead of {right!r}")
            # Products in floating point go on at whole chunks of 256 tokens only.
            if answer["timings"].get("cache_from") == "slot" and answer["tokens_cached"] > held - 320:
                found = documents.index(d)
        check(found is not None, f"after kill {i} the file holds neither document")
        seen.add(found)
    # The prefix cache: killed while it writes.
    for i in range(options.kills):
        d = text(900, 2000 + i // 2)
        status, answer = server.call("POST", "/completion", body_of(d, KV[0]))
        check(status == 200, answer)
        time.sleep(0.2 + pick.random() * 0.1)
        server.kill()
        server = Server(options, *flags)
        status, hit = server.call("POST", "/completion", body_of(d + question, KV[0]))
        status, miss = server.call("POST", "/completion", body_of(d + question, KV[0], kv_reuse="none"))
        check(hit["content"] == miss["content"], f"kill {i}: a hit of {hit['tokens_cached']} tokens differs")
    left = [f for f in os.listdir(saved) + os.listdir(cache) if f.endswith(".tmp")]
    check(len(left) <= 1, f"files are left behind: {left}")
    check(server.stop() == 0, server.said())
    print(f"kill -9: {options.kills} while a slot was saved ({interrupted} cut off, documents found after them: {sorted(seen)}), "
          f"{options.kills} while the prefix cache was written")


def limits(options, folder):
    saved = os.path.join(folder, "full")
    os.makedirs(saved)
    server = Server(options, "-np", "1", "--slot-save-path", saved)
    book = text(900, 5)
    server.call("POST", "/completion", body_of(book, KV[0]))
    check(server.call("POST", "/slots/0?action=save", {"filename": "book.kv"})[0] == 200, "save")
    right = server.call("POST", "/completion", body_of(book + " and", KV[0], kv_reuse="none"))[1]["content"]
    size = os.path.getsize(os.path.join(saved, "book.kv"))
    # A port in use.
    taken = subprocess.run([options.longkv, "serve", "-m", options.model, "--port", str(server.port)], capture_output=True, text=True,
                           timeout=60 * server.patience, check=False)
    check(taken.returncode == 1 and "--port" in taken.stderr, taken)
    # A prompt over the context, beside one that is answered.
    status, answer = server.call("POST", "/v1/completions", {"prompt": text(2 * CONTEXT, 6)})
    check(status == 400 and answer["error"]["type"] == "exceed_context_size_error" and answer["error"]["n_ctx"] == CONTEXT and
          answer["error"]["n_prompt_tokens"] > CONTEXT, answer)
    # A KV file of another recipe, of another model, and one that is none.
    status, answer = server.call("POST", "/slots/0?action=restore", {"filename": "book.kv", "kv": KV[1]})
    check(status == 409 and "other settings" in answer["error"]["message"], answer)
    with open(os.path.join(saved, "noise.kv"), "wb") as file:
        file.write(random.Random(1).randbytes(100000))
    status, answer = server.call("POST", "/slots/0?action=restore", {"filename": "noise.kv"})
    check(status == 409 and answer["error"]["message"], answer)
    check(server.call("POST", "/slots/0?action=restore", {"filename": "none.kv"})[0] == 404, "a file that is not there")
    held = server.call("GET", "/slots")[1][0]["n_tokens"]
    check(held > 900, f"the old state stays: {held}")
    if options.other_model:
        other = argparse.Namespace(**{**vars(options), "model": options.other_model})
        elsewhere = Server(other, "-np", "1", "--slot-save-path", saved)
        status, answer = elsewhere.call("POST", "/slots/0?action=restore", {"filename": "book.kv"})
        check(status == 409 and "model" in answer["error"]["message"], answer)
        elsewhere.stop()
    # A time limit, and a log without what was said.
    status, answer = server.call("POST", "/v1/completions", {"prompt": book, "timeout": 0.01, "max_tokens": 1000, "kv_reuse": "none"})
    check(status == 504 and answer["error"]["type"] == "timeout_error", answer)
    check(server.call("POST", "/completion", body_of(book + " and", KV[0]))[1]["content"] == right, "the server goes on")
    server.stop()
    check("prompt tokens" in server.said() and not any(f" {w} " in server.said() for w in ("bridge", "harvest", "platform")),
          "the log says sizes and times, not words")
    # No room: files may take half of what is needed, and the prefix cache meets the same wall.
    server = Server(options, "-np", "1", "--slot-save-path", saved, "--cache-ram", "64M", "--cache-folder",
                    os.path.join(folder, "full-cache"), limit=size // 2)
    check(server.call("POST", "/completion", body_of(book, KV[0]))[0] == 200, "an answer without room")
    status, answer = server.call("POST", "/slots/0?action=save", {"filename": "book.kv"})
    check(status >= 400 and "cannot write" in answer["error"]["message"], answer)
    check(os.path.getsize(os.path.join(saved, "book.kv")) == size, "the old file stays")
    check(server.call("POST", "/slots/0?action=restore", {"filename": "book.kv"})[0] == 200, "the old file is whole")
    check(server.call("POST", "/completion", body_of(book + " and", KV[0]))[1]["content"] == right, "the server goes on")
    check("prefix cache:" in server.said(), "the prefix cache says that it cannot store")
    server.kill()
    full_disk(options, folder, book, right)
    # A template without end: refused in bounded time, and the server goes on.
    for template in ("{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
                     "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"):
        server = Server(options, "-np", "1", "--chat-template", template)
        begin = time.time()
        status, answer = server.call("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4})
        check(status == 400 and answer["error"]["message"], answer)
        check(time.time() - begin < 20 * server.patience, "a template without end takes too long")
        check(server.call("POST", "/completion", body_of(book + " and", KV[0]))[1]["content"] == right, "the server goes on")
        server.stop()
    print("limits: port, context, files of other models and recipes, files without room, templates")


def full_disk(options, folder, book, right):
    """The same on a small file system, where this user may mount one."""
    small = os.path.join(folder, "small")
    os.makedirs(small)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True, check=False).returncode != 0:
        print("limits: no small file system can be mounted here; a limit on file sizes stood for it")
        return
    try:
        server = Server(options, "-np", "1", "--slot-save-path", small, "--cache-ram", "0", "--cache-folder", os.path.join(small, "c"))
        check(server.call("POST", "/completion", body_of(book, KV[0]))[0] == 200, "an answer without room")
        status, answer = server.call("POST", "/slots/0?action=save", {"filename": "book.kv"})
        check(status >= 400 and "No space" in answer["error"]["message"], answer)
        check(server.call("POST", "/completion", body_of(book + " and", KV[0]))[1]["content"] == right, "the server goes on")
        check(os.listdir(small) == ["c"] and os.listdir(os.path.join(small, "c")) == [], "nothing is left behind")
        server.stop()
    finally:
        subprocess.run(["umount", small], check=False)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("longkv")
    p.add_argument("model")
    p.add_argument("--requests", type=int, default=1000)
    p.add_argument("--kills", type=int, default=12)
    p.add_argument("--other-model")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--parts", default="crowd,kills,limits")
    p.add_argument("--sanitized", action="store_true")
    options = p.parse_args()
    folder = tempfile.mkdtemp(prefix="longkv-trouble-")
    try:
        for part in options.parts.split(","):
            {"crowd": crowd, "kills": kills, "limits": limits}[part](options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("OK")


main()
