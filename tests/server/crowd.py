"""The crowd of trouble.py: clients of every kind, and what each may get."""
import random
import threading
import time

from troubled_server import CONTEXT, KV, body_of, check, leave, streamed, text


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
