#!/usr/bin/env python3
"""Tables of several lengths side by side from summary.csv files of `longkv eval`, as Markdown.

    eval/results_table.py DIR... [--detail]

A row a recipe, a column a length and task: percent right with the 95% interval, a star where the sign test against full
attention on the same prompts gives p < 0.05, the number of prompts below. --detail: divergence, mass, rows and bytes of each length
instead. Standard library only."""
import argparse
import csv
import os


def length_name(n):
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dirs", nargs="+")
    parser.add_argument("--detail", action="store_true")
    o = parser.parse_args()
    rows, order, cells = {}, [], []
    for path in o.dirs:
        for r in csv.DictReader(open(os.path.join(path, "summary.csv"))):
            if int(r["n"]) == 0 or r["metric"] == "nll":
                continue
            cell = (int(r["length"]), r["task"])
            if cell not in cells:
                cells.append(cell)
            if r["kv_label"] not in order:
                order.append(r["kv_label"])
            rows[(r["kv_label"], cell)] = r
    cells.sort(key=lambda c: c[0])
    if o.detail:
        lengths = sorted({c[0] for c in cells})
        print("| recipe | " + " | ".join(f"{length_name(n)}: KL; mass; rows; read KiB; held MiB" for n in lengths) + " |")
        print("| --- |" + " --- |" * len(lengths))
        for label in order:
            line = []
            for n in lengths:
                found = [rows[(label, c)] for c in cells if c[0] == n and (label, c) in rows]
                if not found:
                    line.append("")
                    continue
                mean = lambda key: sum(float(r[key]) for r in found) / len(found)
                line.append(f"{mean('kl_mean'):.3f}; {mean('captured_mass'):.2f}; {mean('rows_attended'):.0f}; "
                            f"{mean('bytes_per_token') / 1024:.0f}; {(mean('kept_bytes') + mean('index_bytes')) / 2**20:.1f}")
            print(f"| {label} | " + " | ".join(line) + " |")
        return
    print("| recipe | " + " | ".join(f"{length_name(n)} {task}" for n, task in cells) + " |")
    print("| --- |" + " --- |" * len(cells))
    for label in order:
        line = []
        for cell in cells:
            r = rows.get((label, cell))
            if r is None:
                line.append("")
                continue
            star = "*" if float(r["sign_test_p"]) < 0.05 else ""
            line.append(f"{100 * float(r['score']):.0f}{star} [{100 * float(r['score_low']):.0f}, "
                        f"{100 * float(r['score_high']):.0f}] {r['n']}")
        print(f"| {label} | " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
