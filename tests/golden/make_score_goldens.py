#!/usr/bin/env python3
"""Writes eval/text_scores.jsonl: 1,000 pairs of texts with LongBench's F1, ROUGE-L, edit ratio and code similarity.

  pip install rouge==1.0.1 rapidfuzz==3.14.6
"""
import collections
import json
import pathlib
import random
import re
import string

from rapidfuzz import fuzz
from rouge import Rouge


def normalise(text):
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def f1(output, reference):
    a, b = normalise(output), normalise(reference)
    same = sum((collections.Counter(a) & collections.Counter(b)).values())
    if same == 0:
        return 0.0
    p, r = same / len(a), same / len(b)
    return 2 * p * r / (p + r)


def rouge_l(output, reference):
    try:
        return Rouge().get_scores([output], [reference], avg=True)["rouge-l"]["f"]
    except ValueError:  # an empty text
        return 0.0


def ratio(a, b):
    return 1.0 if not a and not b else fuzz.ratio(a, b) / 100


def code(output, reference):
    line = next((l for l in output.lstrip("\n").split("\n") if not any(m in l for m in ("`", "#", "//"))), "")
    return round(100 * ratio(line, reference)) / 100


WORDS = ("the a an cat Dog house. houses ran, Ran over under it's It was 12 3.5 (blue) red-green Ünder été Été ПРИВЕТ "
         "привет ΣΟΦΙΑ café \u00a0 x_1 return if(x): # // `code` foo.bar \n \t end. End a.b.c the,the An! \u2019 \u201cquoted\u201d").split(" ")


def text(rng):
    kind = rng.random()
    if kind < 0.04:
        return rng.choice(["", ".", " ", "...", "a", "\n", "the"])
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 30)))


def main():
    rng = random.Random(20261129)
    lines = []
    for _ in range(1000):
        a = text(rng)
        b = text(rng)
        if rng.random() < 0.5:  # related pairs
            words = a.split(" ")
            for _ in range(rng.randint(0, 4)):
                i = rng.randrange(len(words) + 1)
                words[i:i + rng.randint(0, 2)] = [rng.choice(WORDS)]
            b = " ".join(words)
        lines.append(json.dumps([a, b, f1(a, b), rouge_l(a, b), ratio(a, b), code(a, b)], ensure_ascii=False))
    path = pathlib.Path(__file__).parent / "eval/text_scores.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
