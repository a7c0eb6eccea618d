#!/usr/bin/env python3
"""longkv serve, and llama-server beside it, over loopback: reuse, streams, gaps beside a prompt, overhead, restore.

  bench/server/load.py -m MODEL --llama-server .cache/peer/bin/llama-server [--parts reuse,streams,gap,overhead,restore]

Same model file, threads, slots and requests for both; one server runs at a time, the two in turn. Every figure is the median
of --rounds runs of fresh servers. llama-server is built by bench/peers/build_llama_cpp; without it longkv alone is measured.
`restore` wants a KV file of 90,000 tokens: bench/kvfile_bench MODEL restore 90000 FILE, then --kv-file FILE.
Python's standard library only.
"""
import argparse
import http.client
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WORDS = ("the river ran past old mills and quiet fields while a train crossed the stone bridge every hour and people "
         "waited on the platform reading letters about harvest rain and distant cities").split()
DOCUMENT_WORDS = 6900
CONTEXT = 8192
GAP_TOKENS = 3500


def text(words, seed):
    state, out = seed, []
    for _ in range(words):
        state = (state * 1103515245 + 12345) % 2 ** 31
        out.append(WORDS[state // 65536 % len(WORDS)])
    return " ".join(out)


class Server:
    def __init__(self, command):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.process = subprocess.Popen(command + ["--port", str(self.port)], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(f"{' '.join(command)} ended with {self.process.returncode}")
            try:
                if self.call("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        sys.exit(f"{command[0]} does not answer")

    def call(self, method, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        c.request(method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
        r = c.getresponse()
        return r.status, r.read()

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stream(self, prompt, tokens, **more):
        """A streamed completion: its start, the times of its tokens, and its last message."""
        body = dict(prompt=prompt, n_predict=tokens, temperature=0, stream=True, ignore_eos=True, return_tokens=True)
        body.update(more)
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin = time.perf_counter()
        c.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        times, last = [], None
        for line in r:
            if line.startswith(b"data: "):
                now = time.perf_counter()
                message = json.loads(line[6:])
                # A character of several tokens comes as one piece.
                times += [now] * len(message.get("tokens") or ([0] if message.get("content") else []))
                if message.get("stop"):
                    last = message
        if r.status != 200 or last is None:
            sys.exit(f"a request failed: {r.status} {line}")
        return begin, times, last

    def first_token(self, prompt, **more):
        """Seconds to the first token."""
        begin, times, last = self.stream(prompt, 4, **more)
        return times[0] - begin, last


def gaps(times):
    return [b - a for a, b in zip(times, times[1:])]


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * q))]


def reuse(name, start, options, row):
    document = text(DOCUMENT_WORDS, 7)
    folder = tempfile.mkdtemp(dir=options.folder)
    more = ["--cache-folder", folder] if name == "longkv" else ["--slot-save-path", folder]
    try:
        with start(more) as server:
            first, last = server.first_token(document + "\n\nWho waited?", id_slot=0)
            row["document, tokens"] = last["tokens_evaluated"] if name == "longkv" else last["timings"]["prompt_n"]
            row["first question, s to the first token"] = first
            second, _ = server.first_token(document + "\n\nWhat crossed the bridge?", id_slot=0)
            row["second question, s"] = second
            row["**first over second**"] = first / second
            third, _ = server.first_token(document + "\n\nWhere did the river run?", id_slot=1)
            row["another slot, s"] = third
            # llama-server keeps nothing by itself: its slot is saved, and restored after the restart.
            if name != "longkv":
                assert server.call("POST", "/slots/0?action=save", {"filename": "slot.bin"})[0] == 200
        with start(more) as server:
            restore = 0
            if name != "longkv":
                begin = time.perf_counter()
                assert server.call("POST", "/slots/0?action=restore", {"filename": "slot.bin"})[0] == 200
                restore = time.perf_counter() - begin
            fourth, _ = server.first_token(document + "\n\nWhen did the train cross?", id_slot=0)
            row["after a restart, s"] = restore + fourth
            row["**first over after a restart**"] = first / (restore + fourth)
    finally:
        shutil.rmtree(folder)


def streams(name, start, options, row):
    with start([]) as server:
        server.stream(text(60, 99), 16, cache_prompt=False)
        for n in options.streams:
            results = [None] * n

            def one(i):
                results[i] = server.stream(text(60, 100 + i), options.tokens, cache_prompt=False)

            threads = [threading.Thread(target=one, args=(i,)) for i in range(n)]
            begin = time.perf_counter()
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            row[f"**{n} streams, tokens/s in all**"] = n * options.tokens / (time.perf_counter() - begin)
            # Without the prompts: from when all answer to when the first is done.
            begin, end = max(r[1][0] for r in results), min(r[1][-1] for r in results)
            row[f"{n} streams, answers alone, tokens/s"] = sum(begin < t <= end for r in results for t in r[1]) / (end - begin)


def gap(name, start, options, row):
    """A token's gap over what it takes at the same place of the same answer with nothing beside it: an answer of thousands of tokens
    decodes its last ones half as fast as its first."""
    with start([]) as server:
        answer = dict(prompt=text(40, 9), tokens=GAP_TOKENS, cache_prompt=False)
        alone = gaps(server.stream(**answer)[1])
        steps = [statistics.median(alone[max(0, i - 32):i + 33]) for i in range(len(alone))]
        first = statistics.median(alone[:400])
        talk = []
        talker = threading.Thread(target=lambda: talk.extend(server.stream(**answer)[1]))
        talker.start()
        time.sleep(1)
        begin, read, _ = server.stream(text(DOCUMENT_WORDS, 11), 1, cache_prompt=False)
        talker.join()
        waits = [(b - a, step) for a, b, step in zip(talk, talk[1:], steps) if begin <= a and b <= read[0]]
        young = [b - a for a, b in zip(talk[:1000], talk[1:1000]) if begin <= a and b <= read[0]]
        over = [wait / step for wait, step in waits]
        row["ordinary step, ms: first 400 tokens; last of those beside the prompt"] = 1000 * first, 1000 * waits[-1][1]
        # What the machine itself adds to some gaps.
        row["gap of the answer alone, 99th percentile, steps"] = quantile([g / s for g, s in zip(alone, steps)], 0.99)
        row["tokens beside the prompt"] = len(waits)
        row["prompt read beside an answer, s"] = read[0] - begin
        row["gap beside a prompt, median, steps"] = statistics.median(over)
        row["**gap, 99th percentile, steps**"] = quantile(over, 0.99)
        row["gap, largest, steps"] = max(over)
        row["gap, 99th percentile, in steps of the answer's first 400 tokens"] = quantile([wait for wait, _ in waits], 0.99) / first
        row["... among the answer's first 1,000 tokens"] = quantile(young, 0.99) / first
        # What the answer's own growth adds: the same measure without any prompt.
        row["... of the answer alone"] = quantile(alone, 0.99) / first


def overhead(name, start, options, row):
    def bench():
        if name == "longkv":
            command = [options.longkv, "bench", "-m", options.model, "-p", "0", "-n", "256", "-r", "1", "-t",
                       str(options.threads), "-o", "json"]
        else:
            command = [os.path.join(os.path.dirname(options.llama_server), "llama-bench"), "-m", options.model, "-p", "0", "-n",
                       "256", "-r", "1", "-t", str(options.threads), "-o", "json"]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]["samples_ts"][0]

    with start([]) as server:
        shares, before = [], bench()
        for _ in range(9):
            _, times, _ = server.stream("the", 256, cache_prompt=False)
            served = (len(times) - 1) / (times[-1] - times[0])
            after = bench()
            # Both sides of it: the machine's speed drifts by more than what is looked for.
            shares.append(100 * ((before + after) / 2 / served - 1))
            before = after
        row["**HTTP, JSON and sampling, % of a token**"] = statistics.median(shares)
        row["... of nine turns, least and most"] = min(shares), max(shares)


def restore(name, start, options, row):
    if name != "longkv" or not options.kv_file:
        return
    path = pathlib.Path(options.kv_file)
    ids = [1] * options.kv_tokens + [2]
    with Server([options.longkv, "serve", "-q", "-m", options.model, "-t", str(options.threads), "-np", "1", "-c",
                 str(options.kv_tokens + 64), "--slot-save-path", str(path.parent)]) as server:
        begin = time.perf_counter()
        status, answer = server.call("POST", "/slots/0?action=restore", {"filename": path.name})
        assert status == 200, answer
        ready = time.perf_counter() - begin
        first, last = server.first_token(ids, kv_reuse="any")
        assert last["tokens_cached"] == options.kv_tokens, last
        row["KV file, GB"] = path.stat().st_size / 1e9
        row["restored, s"] = ready
        row["... to the first token, s"] = ready + first
        row["**restore to the first token, GB/s**"] = path.stat().st_size / 1e9 / (ready + first)


def cell(values):
    if isinstance(values[0], tuple):
        return f"{min(v[0] for v in values):.3g} to {max(v[1] for v in values):.3g}"
    return f"{statistics.median(values):.4g}"


PARTS = {"reuse": reuse, "streams": streams, "gap": gap, "overhead": overhead, "restore": restore}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("--longkv", default=str(ROOT / "build/release/longkv"))
    p.add_argument("--llama-server")
    p.add_argument("--parts", default="reuse,streams,gap,overhead,restore")
    p.add_argument("--streams", default="1,4,8", type=lambda s: [int(n) for n in s.split(",")])
    p.add_argument("--tokens", type=int, default=128, help="of each stream's answer")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--folder", help="where KV files go; default: the system's temporary folder")
    p.add_argument("--kv-file")
    p.add_argument("--kv-tokens", type=int, default=90000)
    p.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    p.add_argument("--longkv-flags", default="", help="further flags of longkv serve")
    o = p.parse_args()
    slots = max(o.streams)
    commands = {"longkv": [o.longkv, "serve", "-q", "-m", o.model, "-np", str(slots), "-c", str(CONTEXT), "-t", str(o.threads),
                           *o.longkv_flags.split()]}
    if o.llama_server:
        commands["llama-server"] = [o.llama_server, "-m", o.model, "-np", str(slots), "-c", str(CONTEXT * slots), "-t",
                                    str(o.threads), "-tb", str(o.threads)]
    rows = {name: [] for name in commands}
    for _ in range(o.rounds):
        for name, command in commands.items():
            row = {}
            for part in o.parts.split(","):
                PARTS[part](name, lambda more, c=command: Server(c + more), o, row)
            rows[name].append(row)
            print(name, json.dumps(row), file=sys.stderr, flush=True)
    print("| figure | " + " | ".join(commands) + " |\n| --- |" + " --- |" * len(commands))
    for key in rows["longkv"][0]:
        cells = [cell([r[key] for r in rows[n]]) if key in rows[n][0] else "-" for n in commands]
        print(f"| {key} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
