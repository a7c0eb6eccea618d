#!/usr/bin/env python3
"""Writes eval/chinese_words.jsonl: texts as jieba cuts them, and pairs with LongBench's F1 and ROUGE-L for Chinese; and
the same over an invented dictionary, eval/jieba/ and eval/jieba/texts.jsonl, for which no copy of the package is needed.

  pip install jieba==0.42.1 rouge==1.0.1

Texts are random: words of the dictionary by frequency, rare characters, runs of single characters that the hidden Markov
model must join, Latin words, numbers, punctuation, blanks."""
import collections
import json
import pathlib
import random
import string
import tempfile

import jieba
import jieba.finalseg as hmm
from rouge import Rouge

HERE = pathlib.Path(__file__).parent / "eval"
MARKS = ("！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏." + string.punctuation)
LATIN = ["iPhone", "3.14", "2026", "50%", "C++", "c#", "AT&T", "e-mail", "x_1", "1.5%", "A.B", "--", "T恤", "PM2.5", "3.", ".5", "Ünder", "ＡＢＣ"]
BETWEEN = ["，", "。", "！", "《", "》", "“", "”", "、", " ", "\n", "\r\n", "\u3000", "：", "(", ")", "…", "·", "；", "😀", "é"]


def normalised(words):
    words = ["".join("".join(c for c in w.lower() if c not in set(MARKS)).split()) for w in words]
    return [w for w in words if w]


def f1(cut, output, reference):
    a, b = normalised(cut(output)), normalised(cut(reference))
    same = sum((collections.Counter(a) & collections.Counter(b)).values())
    if same == 0:
        return 0.0
    p, r = same / len(a), same / len(b)
    return 2 * p * r / (p + r)


def rouge_l(cut, output, reference):
    try:
        return Rouge().get_scores([" ".join(cut(output))], [" ".join(cut(reference))], avg=True)["rouge-l"]["f"]
    except ValueError:  # an empty text
        return 0.0


def words_of(dictionary):
    words = [(w, n) for w, n in dictionary.FREQ.items() if n > 0]
    words.sort()
    common = [w for w, _ in sorted(words, key=lambda x: (-x[1], x[0]))[:3000]]
    return [w for w, _ in words], common


def text(rng, all_words, common, characters):
    pieces = []
    for _ in range(rng.randint(0, 14)):
        kind = rng.random()
        if kind < 0.55:
            pieces.append(rng.choice(common))
        elif kind < 0.65:
            pieces.append(rng.choice(all_words))
        elif kind < 0.8:
            pieces.append("".join(rng.choice(characters) for _ in range(rng.randint(1, 5))))
        elif kind < 0.88:
            pieces.append(rng.choice(LATIN))
        else:
            pieces.append(rng.choice(BETWEEN))
    return "".join(pieces)


def related(rng, a, common):
    b = list(a)
    for _ in range(rng.randint(1, 5)):
        i = rng.randrange(len(b) + 1)
        b[i:i + rng.randint(0, 3)] = list(rng.choice(common))
    return "".join(b)


def write_pairs(path, rng, dictionary, characters, n):
    all_words, common = words_of(dictionary)
    lines = []
    for _ in range(n):
        a = text(rng, all_words, common, characters)
        b = related(rng, a, common) if rng.random() < 0.6 else text(rng, all_words, common, characters)
        cut = lambda t: list(dictionary.cut(t))
        lines.append(json.dumps([a, b, cut(a), cut(b), f1(cut, a, b), rouge_l(cut, a, b)], ensure_ascii=False))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def invent(rng, folder):
    """A dictionary of 300 words over 50 characters and random tables, in the package's form. Frequencies are few, so that
    ways of equal product are common; so are equal sums of the model, whose numbers are multiples of 1/8."""
    (folder / "finalseg").mkdir(parents=True, exist_ok=True)
    characters = sorted(rng.sample([chr(c) for c in range(0x4e00, 0x9fd6)], 50))
    words = {rng.choice(characters[:30]) + "".join(rng.choice(characters[:30]) for _ in range(rng.randint(0, 3))) for _ in range(300)}
    words |= {"AT&T", "c#", "T" + characters[0], characters[1] + "1"}
    lines = [f"{w} {rng.choice([1, 2, 3, 100, 5000])} n\n" for w in sorted(words)]
    (folder / "dict.txt").write_text("".join(lines), encoding="utf-8")
    number = lambda: -rng.randint(4, 40) / 8
    start = {"B": number(), "E": -3.14e100, "M": -3.14e100, "S": number()}
    steps = {"B": "EM", "E": "BS", "M": "EM", "S": "BS"}
    trans = {s: {t: number() for t in steps[s]} for s in "BEMS"}
    emit = {s: {c: number() for c in characters if rng.random() < 0.8} for s in "BEMS"}
    row = lambda values: "{" + ", ".join(f"'{ascii(k)[1:-1]}': {v!r}" for k, v in values.items()) + "}"
    rows = lambda table: "{" + ",\n ".join(f"'{k}': {row(v)}" for k, v in table.items()) + "}"
    for name, values in (("start", row(start)), ("trans", rows(trans)), ("emit", rows(emit))):
        (folder / "finalseg" / f"prob_{name}.py").write_text("P=" + values + "\n", encoding="utf-8")
    hmm.start_P, hmm.trans_P, hmm.emit_P = start, trans, emit
    dictionary = jieba.Tokenizer(str(folder / "dict.txt"))
    dictionary.tmp_dir = tempfile.mkdtemp()
    dictionary.initialize()
    return dictionary, characters


def main():
    jieba.initialize()
    rng = random.Random(20261130)
    characters = sorted(c for c in hmm.emit_P["S"] if "\u4e00" <= c <= "\u9fd5")
    write_pairs(HERE / "chinese_words.jsonl", rng, jieba.dt, characters, 500)
    dictionary, characters = invent(rng, HERE / "jieba")
    write_pairs(HERE / "jieba/texts.jsonl", rng, dictionary, characters, 300)


if __name__ == "__main__":
    main()
