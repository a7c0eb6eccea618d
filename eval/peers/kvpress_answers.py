#!/usr/bin/env python3
r"""NVIDIA's kvpress on the very prompts of `longkv eval`, on the CPU in fp32, scored by the same rules.

    longkv eval -m MODEL.gguf --tasks ... --lengths 2K --samples 8 --prompts prompts.jsonl
    longkv eval -m MODEL.gguf --tasks ... --lengths 2K --samples 8 -o DIR --kv "$(eval/peers/kvpress_answers.py --recipes \
        --press snapkv,knorm --budget 512)"
    eval/peers/kvpress_answers.py -m MODEL.gguf --prompts prompts.jsonl --results DIR --press snapkv,knorm --budget 512

Both read the document, compress it, and then decode question and answer. kvpress keeps a share of the document's rows:
the one that gives --budget rows for each prompt. With --results the scores stand beside longkv's for the same prompts,
and longkv's own answers are scored here again, so that a difference of the rules would show. Needs kvpress,
transformers, torch, gguf."""
import argparse
import json
import math
import os
import re
import sys
from collections import defaultdict


# longkv's recipes with the parameters of the presses, of which a share of the document's rows stays.
RECIPES = {
    "full": "full",
    "streaming": "streaming:budget={}",
    "snapkv": "snapkv:budget={},window=64,kernel=5,pool=avg",
    "pyramidkv": "pyramidkv:budget={},window=64,kernel=5,pool=avg,window_inside=true",
    "tova": "tova:budget={},sink=0",
    "knorm": "knorm:budget={}",
    "keydiff": "keydiff:budget={}",
    "expected_attention": "expected_attention:budget={}",
    "think": "think",
}


def make_press(name, ratio):
    import kvpress
    return {
        "full": lambda: None,
        "streaming": lambda: kvpress.StreamingLLMPress(ratio, n_sink=4),
        "snapkv": lambda: kvpress.SnapKVPress(ratio, window_size=64, kernel_size=5),
        "pyramidkv": lambda: kvpress.PyramidKVPress(ratio, window_size=64, kernel_size=5),
        "tova": lambda: kvpress.TOVAPress(ratio),
        "knorm": lambda: kvpress.KnormPress(ratio),
        "keydiff": lambda: kvpress.KeyDiffPress(ratio),
        "expected_attention": lambda: kvpress.ExpectedAttentionPress(ratio),
        "think": lambda: kvpress.ThinKPress(key_channel_compression_ratio=0.4, window_size=32),
    }[name]()


def score(metric, text, references):
    if metric == "all_substrings":
        return sum(r.lower() in text.lower() for r in references) / len(references)
    if metric == "all_words":
        return sum(bool(re.search(r"(?<![A-Za-z0-9_])" + re.escape(r) + r"(?![A-Za-z0-9_])", text)) for r in references) / len(
            references)
    if metric == "word":
        return float(any(re.search(r"(?<![A-Za-z0-9_])" + re.escape(r) + r"(?![A-Za-z0-9_])", text) for r in references))
    raise SystemExit(f"metric {metric} has no counterpart here")


def cut(text, stop):
    """As longkv: before the stop, once something but blanks was said."""
    if not stop:
        return text
    begin = len(text) - len(text.lstrip())
    end = text.find(stop, begin + 1)
    return text if end < 0 else text[:end]


def answer(model, tokenizer, press, prompt, eos):
    import torch
    from transformers import DynamicCache
    document = prompt["document_tokens"]
    ids = torch.tensor([prompt["ids"][:document]])
    cache = DynamicCache()
    if press is None:
        model.model(input_ids=ids, past_key_values=cache)
    else:
        with press(model):
            model.model(input_ids=ids, past_key_values=cache)
    said, fed = [], prompt["ids"][document:]
    position = document
    while True:
        # Token by token, as longkv does: layers that keep different numbers of rows have no mask for more.
        for token in fed:
            step = torch.tensor([[token]])
            logits = model(input_ids=step, past_key_values=cache, position_ids=torch.tensor([[position]])).logits[0, -1]
            position += 1
        token = int(logits.argmax())
        if token in eos:
            break
        said.append(token)
        text = tokenizer.decode(said)
        if len(said) >= prompt["new_tokens"] or cut(text, prompt["stop"]) != text:
            break
        fed = [token]
    return cut(tokenizer.decode(said), prompt["stop"]) if said else ""


def wilson(p, n):
    z = 1.96
    centre, half = (p + z * z / (2 * n)) / (1 + z * z / n), z / (1 + z * z / n) * math.sqrt(
        p * (1 - p) / n + z * z / (4 * n * n))
    return f"{100 * p:.0f} [{100 * (centre - half):.0f}, {100 * (centre + half):.0f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", help="GGUF file that transformers reads")
    parser.add_argument("--prompts", help="of longkv eval --prompts")
    parser.add_argument("--results", help="folder of longkv eval on the same prompts")
    parser.add_argument("--press", default="full,streaming,snapkv,knorm,expected_attention")
    parser.add_argument("--budget", type=int, default=512, help="rows kept of each document")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--output", help="answers as lines of JSON")
    parser.add_argument("--recipes", action="store_true", help="only print the presses as recipes of longkv eval --kv")
    o = parser.parse_args()
    chosen = o.press.split(",")
    for press in chosen:
        if press not in RECIPES:
            parser.error(f"--press {press} is unknown; known are {', '.join(RECIPES)}")
    if o.recipes:
        print(",".join(RECIPES[press].format(o.budget) for press in chosen))
        return
    if not o.model or not o.prompts:
        parser.error("-m and --prompts are needed")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    torch.set_grad_enabled(False)
    if o.threads:
        torch.set_num_threads(o.threads)
    folder, name = os.path.split(os.path.abspath(o.model))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32,
                                                 attn_implementation="sdpa").eval()
    eos = {tokenizer.eos_token_id} | {tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<end_of_turn>", "<|eos|>")
                                      if t in tokenizer.get_vocab()}
    prompts = [json.loads(line) for line in open(o.prompts)]
    ours = {}
    if o.results:
        for line in open(os.path.join(o.results, "samples.jsonl")):
            r = json.loads(line)
            ours[(r["prompt_hash"], r["kv_label"])] = r
    rows, answers = defaultdict(list), []
    for prompt in prompts:
        if "ids" not in prompt or prompt["metric"] == "nll":
            continue
        for press in chosen:
            ratio = max(0.0, 1 - o.budget / prompt["document_tokens"])
            text = answer(model, tokenizer, make_press(press, ratio), prompt, eos)
            s = score(prompt["metric"], text, prompt["references"])
            label = RECIPES[press].format(o.budget)
            mine = ours.get((prompt["prompt_hash"], label))
            if mine:
                again = score(mine["metric"], mine["text"], mine["references"])
                if again != mine["score"]:
                    sys.exit(f"the rules differ: {mine['text']!r} scores {mine['score']} there and {again} here")
            rows[(prompt["task"], prompt["length"], label)].append((s, mine["score"] if mine else None,
                                                                     text.strip() == mine["text"].strip() if mine else None))
            answers.append({"task": prompt["task"], "length": prompt["length"], "index": prompt["index"], "kv": label,
                            "text": text, "score": s})
            print(f"{prompt['task']} #{prompt['index']} {label}: {s:.2f} {text!r}", file=sys.stderr)
    print("| task | tokens | recipe | n | kvpress | longkv | same text |\n| --- | --- | --- | --- | --- | --- | --- |")
    for (task, length, label), found in sorted(rows.items()):
        n = len(found)
        both = [f for f in found if f[1] is not None]
        longkv = wilson(sum(f[1] for f in both) / len(both), len(both)) if both else "-"
        same = f"{sum(f[2] for f in both)}/{len(both)}" if both else "-"
        print(f"| {task} | {length} | {label} | {n} | {wilson(sum(f[0] for f in found) / n, n)} | {longkv} | {same} |")
    if o.output:
        with open(o.output, "w") as f:
            f.writelines(json.dumps(a) + "\n" for a in answers)


if __name__ == "__main__":
    main()
