#!/usr/bin/env python3
"""Loads longkv serve, and llama-server beside it, over loopback: streams, reuse, gaps, overhead.

  bench/server/load.py -m MODEL [--longkv build/release/longkv] [--llama-server PATH] [--streams 1,4,8] [-t 2]

One server runs at a time, the two in turn; every figure is the median of --rounds. Needs Python's standard library only.
"""
import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time

WORDS = ("the river ran past old mills and quiet fields while a train crossed the stone bridge every hour and people "
         "waited on the platform reading letters about harvest rain and distant cities").split()


def text(words, seed):
    state, out = seed, []
    for _ in range(words):
        state = (state * 1103515245 + 12345) % 2 ** 31
        out.append(WORDS[state // 65536 % len(WORDS)])
    return " ".join(out)


class Server:
    def __init__(self, command, log):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.process = subprocess.Popen(command + ["--port", str(self.port)], stdout=log, stderr=log)
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(f"{command[0]} ended with {self.process.returncode}")
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        sys.exit(f"{command[0]} does not answer")

    def get(self, path):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        c.request("GET", path)
        r = c.getresponse()
        return r.status, r.read()

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def stream(self, prompt, tokens, **more):
        """Times of the tokens of a streamed completion, from the request's start."""
        body = dict(prompt=prompt, n_predict=tokens, temperature=0, stream=True, ignore_eos=True, **more)
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin = time.perf_counter()
        c.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        times, last = [], None
        for line in r:
            if line.startswith(b"data: "):
                message = json.loads(line[6:])
                if message.get("content"):
                    times.append(time.perf_counter() - begin)
                if message.get("stop"):
                    last = message
        if r.status != 200 or last is None:
            sys.exit(f"a request failed: {r.status}")
        return times, last


def measure(server, streams, tokens):
    row = {}
    for n in streams:
        results = [None] * n

        def one(i):
            results[i] = server.stream(text(60, 100 + i), tokens, cache_prompt=False)

        begin = time.perf_counter()
        threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        first = min(r[0][0] for r in results)
        last = max(r[0][-1] for r in results)
        row[f"{n} streams, tokens/s"] = sum(len(r[0]) - 1 for r in results) / (last - first)
        row[f"{n} streams, whole, tokens/s"] = sum(r[1]["tokens_predicted"] for r in results) / (time.perf_counter() - begin)
    document = text(5200, 7)
    times, last = server.stream(document + "\n\nWho waited?", 4)
    row["document, tokens"] = last.get("tokens_evaluated", 0)
    row["first question, s to first token"] = times[0]
    times, last = server.stream(document + "\n\nWhat crossed the bridge?", 4)
    row["second question, s to first token"] = times[0]
    row["second over first"] = row["first question, s to first token"] / times[0]
    # A running answer while another document is read.
    alone, _ = server.stream(text(40, 9), 60, cache_prompt=False)
    step = statistics.median(b - a for a, b in zip(alone, alone[1:]))
    gaps = []
    done = threading.Event()

    def talk():
        while not done.is_set():
            t, _ = server.stream(text(40, 9), 400, cache_prompt=False)
            gaps.append([(a, b) for a, b in zip(t, t[1:])])

    talker = threading.Thread(target=talk)
    talker.start()
    time.sleep(0.5)
    server.stream(text(5200, 11), 1, cache_prompt=False)
    done.set()
    talker.join()
    waits = sorted(b - a for run in gaps for a, b in run)
    row["ordinary step, ms"] = 1000 * step
    row["gap beside a prompt, 99th percentile, steps"] = waits[len(waits) * 99 // 100] / step
    return row


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("--longkv", default=os.path.join(os.path.dirname(__file__), "../../build/release/longkv"))
    p.add_argument("--llama-server", help="a build of the same machine; without it longkv alone is measured")
    p.add_argument("--streams", default="1,4,8")
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    o = p.parse_args()
    streams = [int(n) for n in o.streams.split(",")]
    slots = max(streams)
    servers = {"longkv": [o.longkv, "serve", "-q", "-m", o.model, "-np", str(slots), "-c", "8192", "-t", str(o.threads)]}
    if o.llama_server:
        servers["llama-server"] = [o.llama_server, "-m", o.model, "-np", str(slots), "-c", str(8192 * slots),
                                   "-t", str(o.threads), "-tb", str(o.threads), "--no-webui"]
    rows = {name: [] for name in servers}
    with open(os.devnull, "w") as log:
        for _ in range(o.rounds):
            for name, command in servers.items():
                server = Server(command, log)
                try:
                    rows[name].append(measure(server, streams, o.tokens))
                finally:
                    server.stop()
    print("| figure | " + " | ".join(servers) + " |\n| --- |" + " --- |" * len(servers))
    for key in rows["longkv"][0]:
        print(f"| {key} | " + " | ".join(f"{statistics.median(r[key] for r in rows[n]):.4g}" for n in servers) + " |")


if __name__ == "__main__":
    main()
