#!/usr/bin/env python3
"""Tables of `longkv eval` as Markdown, one a length, from the summary.csv of one or several folders.

    eval/results_table.py DIR... [--by length|task]

A row a recipe. A cell of a task: percent right, 95% interval, number of prompts in brackets; a star where the sign test against full attention
on the same prompts gives p < 0.05. Behind them the means over the tasks of that row: divergence, mass, rows, bytes read a token and
bytes held. --by task: scores of all lengths side by side, without these. Standard library only."""
import argparse
import csv
import os


def length_name(n):
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def score(r):
    star = "*" if float(r["sign_test_p"]) < 0.05 else ""
    return (f"{100 * float(r['score']):.0f}{star} [{100 * float(r['score_low']):.0f}, {100 * float(r['score_high']):.0f}] "
            f"({r['n']})")


def read(dirs):
    """Rows by (label, length, task), labels in the order in which they first come."""
    rows, labels = {}, []
    for path in dirs:
        for r in csv.DictReader(open(os.path.join(path, "summary.csv"))):
            if int(r["n"]) == 0 or r["metric"] == "nll":
                continue
            if r["kv_label"] not in labels:
                labels.append(r["kv_label"])
            rows[(r["kv_label"], int(r["length"]), r["task"])] = r
    return rows, labels


def shown(label):
    return label.replace("models/", "")


def by_length(rows, labels, tasks, length):
    print(f"\n| {length_name(length)} | " + " | ".join(tasks) + " | KL | mass | rows | read KiB | held MiB |")
    print("| --- |" + " --- |" * (len(tasks) + 5))
    for label in labels:
        found = {t: rows[(label, length, t)] for t in tasks if (label, length, t) in rows}
        if not found:
            continue
        mean = lambda *keys: sum(sum(float(r[k]) for k in keys) for r in found.values()) / len(found)
        print(f"| {shown(label)} | " + " | ".join(score(found[t]) if t in found else "" for t in tasks) +
              f" | {mean('kl_mean'):.3f} | {mean('captured_mass'):.2f} | {mean('rows_attended'):.0f} | "
              f"{mean('bytes_per_token') / 1024:.0f} | {mean('kept_bytes', 'index_bytes') / 2**20:.1f} |")


def by_task(rows, labels, tasks, lengths):
    cells = [(n, t) for n in lengths for t in tasks if any((label, n, t) in rows for label in labels)]
    print("| recipe | " + " | ".join(f"{length_name(n)} {t}" for n, t in cells) + " |")
    print("| --- |" + " --- |" * len(cells))
    for label in labels:
        line = [score(rows[(label, n, t)]) if (label, n, t) in rows else "" for n, t in cells]
        print(f"| {shown(label)} | " + " | ".join(line) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dirs", nargs="+")
    parser.add_argument("--by", choices=["length", "task"], default="length")
    o = parser.parse_args()
    rows, labels = read(o.dirs)
    lengths = sorted({key[1] for key in rows})
    tasks = sorted({key[2] for key in rows})
    if o.by == "task":
        by_task(rows, labels, tasks, lengths)
        return
    for length in lengths:
        by_length(rows, labels, tasks, length)


if __name__ == "__main__":
    main()
