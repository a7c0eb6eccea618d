#!/usr/bin/env python3
"""A table of docs/results.md back as a folder for `longkv eval --report`, for its pictures where samples of several rounds are joined.

    eval/samples_of_table.py docs/results.md 32K DIR && longkv eval --report -o DIR      DIR/plots/*.svg

A cell of n prompts and p percent becomes n answers, p percent of which are right; their rows and bytes are the row's means. Texts, depths and
divergences of single answers are not there, so only pictures of scores against budgets and bytes mean anything. Standard library only."""
import argparse
import json
import os
import re

NUMBERS = ["kl_max", "same_top", "output_error", "prefill_seconds", "seconds_per_token", "kept_rows"]
COUNTS = ["candidates", "answer_hash", "prompt_hash", "prompt_tokens", "document_tokens", "new_tokens", "answer_tokens", "units",
          "compared", "checked", "seed", "index_bytes"]


def table(path, length):
    """Names of the tasks, and (label, cells) of every row of the table that begins with this length."""
    tasks, rows = [], []
    for line in open(path):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith(f"| {length} |"):
            tasks = cells[1:cells.index("KL")]
        elif tasks and not line.startswith("|"):
            return tasks, rows
        elif tasks and not line.startswith("| ---"):
            rows.append((cells[0], cells[1:]))
    return tasks, rows


def answers(label, task, cell, means, tokens):
    found = re.match(r"(\d+)\*? \[.*\] \((\d+)\)$", cell)
    if not found:
        return
    percent, n = map(int, found.groups())
    right = round(percent * n / 100)
    kl, mass, attended, read, held = map(float, means)
    for index in range(n):
        r = {"suite": "longkv", "task": task, "version": 1, "length": tokens, "depth": -1.0, "real_depth": -1.0, "index": index,
             "kv": "store=f16 + select=all" if label == "full" else label, "kv_label": label, "question": "hidden", "sparse": "question, answer",
             "metric": "word", "skipped": "", "score": float(index < right), "text": "", "finish": "", "references": [],
             "kl_mean": kl, "captured_mass": mass, "kl_buckets": [], "layer_mass": [], "head_mass": [], "read_on": "CPU", "jobs": 1,
             "shared_prefill": True, "rows_attended": attended, "bytes_per_token": read * 1024, "kept_bytes": int(held * 2**20)}
        yield {**r, **dict.fromkeys(NUMBERS, 0.0), **dict.fromkeys(COUNTS, 0)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file")
    parser.add_argument("length", help="as the table's first cell says it")
    parser.add_argument("dir")
    o = parser.parse_args()
    tasks, rows = table(o.file, o.length)
    if not rows:
        parser.error(f"no table of {o.length} in {o.file}")
    tokens = int(o.length.rstrip("K")) * (1024 if o.length.endswith("K") else 1)
    os.makedirs(o.dir, exist_ok=True)
    with open(os.path.join(o.dir, "samples.jsonl"), "w") as out:
        for label, cells in rows:
            for task, cell in zip(tasks, cells):
                for r in answers(label, task, cell, cells[len(tasks):], tokens):
                    out.write(json.dumps(r) + "\n")
    with open(os.path.join(o.dir, "run.json"), "w") as out:
        json.dump({"format": 2, "note": {"table": o.file}}, out)


if __name__ == "__main__":
    main()
