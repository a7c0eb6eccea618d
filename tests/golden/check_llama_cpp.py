#!/usr/bin/env python3
"""Compares the tiny models with an independent engine: perplexity of transformers and of llama.cpp's llama-perplexity.

Both score the second half of windows of 160 tokens, each window opened by the BOS token. llama.cpp rounds activations
to f16 before an f16 product, so agreement to about 0.1% is what a right file shows; a wrong rotary order, norm or
scale changes the perplexity of these random models by several percent or more.

Usage: python check_llama_cpp.py BIN_DIRECTORY [NAME...]
"""
import math
import pathlib
import re
import subprocess
import sys
import tempfile

import torch

import golden_io
import tiny_models

WINDOW, CHUNKS = 160, 4
# llama.cpp reads these two keys for some families only; the rotary formula is the same.
FLAGS = {"llama-yarn-betas": ["--yarn-beta-fast", "16", "--yarn-beta-slow", "2"]}
TEXT = "".join(f"Line {i}: the tide of day {i * 37 % 91} rose {i * i % 17} feet above the quay, said the clerk.\n"
               for i in range(40))[:WINDOW * CHUNKS]


def expected(model):
    total, count = 0.0, 0
    for c in range(CHUNKS):
        # llama-perplexity tokenizes with BOS in front, then overwrites the first token of every window with BOS.
        window = ([256] + list(TEXT.encode()))[c * WINDOW:(c + 1) * WINDOW]
        window[0] = 256
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([window])).logits[0].double(), -1)
        for t in range(WINDOW // 2, WINDOW - 1):
            total -= float(logp[t, window[t + 1]])
            count += 1
    return math.exp(total / count)


def measured(binary, name, path):
    for _ in range(5):  # a run this short may end before its log thread has printed the figure
        run = subprocess.run([binary, "-m", golden_io.HERE / f"{name}.gguf", "-f", path, "-c", str(WINDOW),
                              "-b", str(WINDOW), "-t", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off",
                              *FLAGS.get(name, [])], capture_output=True, text=True)
        found = re.search(r"Final estimate: PPL = ([0-9.]+)", run.stdout + run.stderr)
        if found:
            return float(found.group(1))
    print(run.stderr[-2000:], file=sys.stderr)
    return math.nan


def main():
    binary = pathlib.Path(sys.argv[1]) / "llama-perplexity"
    bad = 0
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write(TEXT)
        text.flush()
        for seed, name in enumerate(tiny_models.MODELS, start=1):
            if len(sys.argv) > 2 and name not in sys.argv[2:]:
                continue
            model = tiny_models.build(name, seed)
            if name.startswith("phi3"):
                model.config.sliding_window = None  # llama.cpp reads phi3 windows and does not apply them
            ours = expected(model)
            theirs = measured(binary, name, text.name)
            good = abs(theirs / ours - 1) < 2e-3
            bad += not good
            print(f"{name:24} transformers {ours:12.4f}  llama.cpp {theirs:12.4f}  "
                  f"{100 * (theirs / ours - 1):+.3f}%  {'ok' if good else 'DIFFERS'}")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
