#!/usr/bin/env python3
"""Needles, key-value pairs and variable chains in long text, answered under several KV recipes.

Prompt forms are those that models/needle-10m-128k-f16.gguf was trained on (models/README.md). The question is decoded
after the document was read, so no recipe sees it while it prepares. Standard library only.

  bench/needle_tasks.py --program build/release/longkv --lengths 32768 --samples 3 --kv full quest:budget=2048
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import string
import subprocess
import tempfile
import uuid

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORDS = "amber anchor basil cedar coral delta ember fjord grove heron ivory jasper kestrel laurel maple".split()


def haystack(rng, length):
    """Paragraphs of the book excerpt in random order, repeated as needed."""
    book = (ROOT / "examples/book/tom_sawyer_3_5.txt").read_text(encoding="utf-8")
    paragraphs = [" ".join(p.split()) for p in book.split("\n\n") if p.strip()]
    sentences, size = [], 0
    while size < length:
        rng.shuffle(paragraphs)
        for p in paragraphs:
            for s in p.split(". "):
                s = s.encode("ascii", "ignore").decode().rstrip(".") + "."
                sentences.append(" " + s)
                size += len(s) + 1
    return sentences


def with_needles(rng, length, needles):
    """The needles at random places, in order, in text of `length` bytes."""
    sentences = haystack(rng, length)
    room, kept, size = length - sum(map(len, needles)), [], 0
    for s in sentences:
        if size + len(s) > room:
            break
        kept.append(s)
        size += len(s)
    places = sorted(rng.sample(range(len(kept) // 20, len(kept) - len(kept) // 20), len(needles)))
    for place, needle in reversed(list(zip(places, needles))):
        kept.insert(place, needle)
    return "".join(kept)


def niah(rng, length):
    keys = rng.sample([f"{a}-{b}" for a in WORDS for b in WORDS if a != b], 4)
    values = [str(rng.randrange(10**6, 10**7)) for _ in keys]
    needles = [f" One of the special magic numbers for {k} is: {v}." for k, v in zip(keys, values)]
    head = "Some special magic numbers are hidden within the following text. Memorize them.\n"
    pick = rng.randrange(4)
    question = (f"\nWhat is the special magic number for {keys[pick]} mentioned in the provided text? "
                f"The special magic number for {keys[pick]} mentioned in the provided text is")
    return head + with_needles(rng, length - len(head) - len(question), needles), question, f" {values[pick]}."


def kv(rng, length):
    head = "Extract the value of the specified key from the JSON object below.\n\nJSON data:\n{"
    def name():
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    pairs = [(name(), name()) for _ in range((length - 300) // 80)]
    key, value = pairs[rng.randrange(len(pairs) // 10, len(pairs))]
    body = ", ".join(f'"{k}": "{v}"' for k, v in pairs)
    return head + body + "}", f'\n\nKey: "{key}"\nThe value of the specified key is: "', f'{value}"'


def vt(rng, length):
    names = rng.sample(["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(64)], 6)
    number = str(rng.randrange(10000, 99999))
    decoy = str(rng.randrange(10000, 99999))
    needles = [f" VAR {names[0]} = {number}. ", f" VAR {names[3]} = {decoy}. ", f" VAR {names[1]} = VAR {names[0]}. ",
               f" VAR {names[4]} = VAR {names[3]}. "]
    head = "Memorize and track the chains of variable assignment hidden in the following text.\n"
    question = f"\nWhat is the value of VAR {names[1]}? VAR {names[1]} ="
    return head + with_needles(rng, length - len(head) - len(question), needles), question, f" VAR {names[0]} = {number}."


TASKS = {"niah": niah, "kv": kv, "vt": vt}


def answer(options, recipe, document, question, expected):
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as f:
        f.write(document)
    try:
        command = [options.program, "run", "-m", options.model, "--raw", "--no-escape", "--hide-question", "-f", f.name, "-p", question,
                   "-n", str(len(expected)), "--temp", "0", "--kv", recipe, "-t", str(options.threads), "-q", "--json"]
        if options.check:
            command += ["--kv-check", "4"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(result.stderr)
        return json.loads(result.stdout)
    finally:
        os.unlink(f.name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(ROOT / "build/release/longkv"))
    parser.add_argument("--model", default=str(ROOT / "models/needle-10m-128k-f16.gguf"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768])
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--kv", nargs="+", default=["full", "quest:budget=2048"])
    parser.add_argument("--threads", type=int, default=2, help="of one run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--check", action="store_true", help="also measure the captured attention mass")
    parser.add_argument("--write", metavar="DIR", help="only write the prompts to DIR, for recipes_bench")
    options = parser.parse_args()

    jobs = []
    for length in options.lengths:
        for task in options.tasks:
            for index in range(options.samples):
                prompt = TASKS[task](random.Random(f"{options.seed}/{task}/{length}/{index}"), length)
                jobs += [(length, task, recipe, prompt) for recipe in options.kv]
    if options.write:
        os.makedirs(options.write, exist_ok=True)
        seen = {}
        for length, task, _, prompt in jobs[::len(options.kv)]:
            index = seen[(length, task)] = seen.get((length, task), -1) + 1
            for part, text in zip(("document", "question", "answer"), prompt):
                pathlib.Path(options.write, f"{index}-{task}-{length}.{part}").write_text(text, encoding="utf-8")
        return
    results = {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [(j, pool.submit(answer, options, j[2], *j[3])) for j in jobs]
        for (length, task, recipe, prompt), future in futures:
            result = future.result()
            right = result["text"].startswith(prompt[2])
            results.setdefault((length, recipe, task), []).append((right, result["cost"]))
    print("| length | recipe | " + " | ".join(options.tasks) + " | KV + index bytes a token | rows | captured mass | prompt tokens/s | prompt density |")
    print("| --- " * (7 + len(options.tasks)) + "|")
    for length in options.lengths:
        for recipe in options.kv:
            cells, costs = [], []
            for task in options.tasks:
                rows = results[(length, recipe, task)]
                cells.append(f"{sum(r for r, _ in rows)}/{len(rows)}")
                costs += [c for _, c in rows]
            def mean(key):
                values = [c[key] for c in costs if key in c]
                return sum(values) / len(values) if values else float("nan")
            bytes_read = mean("kv_bytes_per_token") + mean("index_bytes_per_token")
            print(f"| {length} | {recipe} | " + " | ".join(cells) +
                  f" | {bytes_read:.0f} | {mean('rows_attended'):.0f} | {mean('captured_mass'):.3f}"
                  f" | {mean('prompt_tokens_per_second'):.0f} | {mean('prompt_density'):.3f} |")


if __name__ == "__main__":
    main()
