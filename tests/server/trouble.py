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
import argparse
import http.client
import json
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time

from crowd import Crowd
from troubled_server import CONTEXT, KV, QUARANTINE, Server, body_of, check, text


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
