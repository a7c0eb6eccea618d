#!/usr/bin/env python3
"""Tables of `longkv eval` as Markdown, one a length, from the summary.csv of one or several folders.

    eval/results_table.py DIR... [--by length|task] [--into FILE]

A row a recipe. A cell of a task: percent right, 95% interval, number of prompts in brackets; a star where the sign test against full attention
on the same prompts gives p < 0.05. Behind them the means over the tasks of that row: divergence, mass, rows, bytes read a token and
bytes held. --by task: scores of all lengths side by side, without these. --into: rows go into the tables of a file that begin with the same
length and tasks; one that is there with as many prompts or more stays, a new recipe comes behind its kin. Standard library only."""
import argparse
import csv
import os
import re


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
    """Lines of the table, its head and the line below among them."""
    lines = [f"| {length_name(length)} | " + " | ".join(tasks) + " | KL | mass | rows | read KiB | held MiB |",
             "| --- |" + " --- |" * (len(tasks) + 5)]
    for label in labels:
        found = {t: rows[(label, length, t)] for t in tasks if (label, length, t) in rows}
        if not found:
            continue
        mean = lambda *keys: sum(sum(float(r[k]) for k in keys) for r in found.values()) / len(found)
        lines.append(f"| {shown(label)} | " + " | ".join(score(found[t]) if t in found else "" for t in tasks) +
                     f" | {mean('kl_mean'):.3f} | {mean('captured_mass'):.2f} | {mean('rows_attended'):.0f} | "
                     f"{mean('bytes_per_token') / 1024:.0f} | {mean('kept_bytes', 'index_bytes') / 2**20:.1f} |")
    return lines


def label_of(line):
    return line.strip("| ").split(" | ")[0].strip()


def prompts(line):
    """Numbers of prompts in a row's cells, together."""
    return sum(int(n) for n in re.findall(r"\] \((\d+)\)", line))


def place(lines, label):
    """Where a new recipe comes: among its budgets, else behind the rows of its first word, else at the end."""
    series, own = re.sub(r"budget=\d+", "", label), budget(label)
    same = [i for i, line in enumerate(lines) if re.sub(r"budget=\d+", "", label_of(line)) == series]
    larger = [i for i in same if budget(label_of(lines[i])) > own]
    if larger:
        return larger[0]
    word = lambda text: re.split(r"[:+ ]", text)[0]
    near = same or [i for i, line in enumerate(lines) if word(label_of(line)) == word(label)]
    return near[-1] + 1 if near else len(lines)


def budget(label):
    found = re.search(r"budget=(\d+)", label)
    return int(found.group(1)) if found else 0


def joined(old, new):
    """Rows of an older table with those of a newer one, without heads."""
    lines = list(old)
    for row in new:
        at = [i for i, line in enumerate(lines) if label_of(line) == label_of(row)]
        if at:
            if prompts(row) > prompts(lines[at[0]]):
                lines[at[0]] = row
            continue
        lines.insert(place(lines, label_of(row)), row)
    return lines


def put_into(path, tables):
    text = open(path).read().split("\n")
    for table in tables:
        if table[0] not in text:
            raise SystemExit(f"no table in {path} begins with: {table[0]}")
        begin = end = text.index(table[0]) + 2
        while end < len(text) and text[end].startswith("|"):
            end += 1
        text[begin:end] = joined(text[begin:end], table[2:])
    with open(path, "w") as out:
        out.write("\n".join(text))


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
    parser.add_argument("--into", metavar="FILE")
    o = parser.parse_args()
    rows, labels = read(o.dirs)
    lengths = sorted({key[1] for key in rows})
    tasks = sorted({key[2] for key in rows})
    if o.by == "task":
        by_task(rows, labels, tasks, lengths)
        return
    tables = [by_length(rows, labels, tasks, length) for length in lengths]
    if o.into:
        put_into(o.into, tables)
        return
    for table in tables:
        print("\n" + "\n".join(table))


if __name__ == "__main__":
    main()
